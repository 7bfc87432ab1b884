"""What a checkpoint's side files say about the model as a whole: its name, license, origin and chat template."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml

from convert.bounded_json import load_object
from convert.domain import Source

_TEMPLATE = files("convert").joinpath("chat_template.jinja")
_LARGEST_FRONT_MATTER = 1 << 16
_LARGEST_LIST = 256
_HUB = "https://huggingface.co/"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A model that this one was made from: its name, organization and address where the card tells them."""

    name: str
    organization: str | None
    url: str | None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The front matter of README.md and ``_name_or_path`` of config.json; None and empty for what is not said.

    Attributes:
        name: as the card or the config states it, never a folder's name.
        license, license_name, license_link: as on the Hub (``other`` needs the other two).
        base_models: models named by ``base_model``.
        tags, languages: as listed, ``pipeline_tag`` among the tags.
        warnings: why a part could not be read.
    """

    name: str | None
    organization: str | None
    license: str | None
    license_name: str | None
    license_link: str | None
    base_models: tuple[BaseModel, ...]
    tags: tuple[str, ...]
    languages: tuple[str, ...]
    warnings: tuple[str, ...]


def read_model_card(source: Source) -> ModelCard:
    """Read README.md and config.json of ``source``; a fault of the card is a warning.

    Raises:
        InputError: config.json is no JSON object.
    """
    card, warnings = _front_matter(source.read_file("README.md"))
    organization, name = _split_id(_name_or_path(source))
    licenses = _texts(card.get("license"))
    base_models = tuple(_base_model(text) for text in _texts(card.get("base_model")))
    return ModelCard(
        name=_text(card.get("model_name")) or name,
        organization=organization,
        license=",".join(licenses) or None,
        license_name=_text(card.get("license_name")),
        license_link=_text(card.get("license_link")),
        base_models=base_models,
        tags=_unique(_texts(card.get("tags")) + _texts(card.get("pipeline_tag"))),
        languages=_unique(_texts(card.get("language")) + _texts(card.get("languages"))),
        warnings=warnings,
    )


def read_chat_template(source: Source) -> str | None:
    """The checkpoint's Jinja chat template: ``chat_template.jinja``, else ``chat_template`` of tokenizer_config.json.

    A list of named templates gives the one called ``default``. None when there is none.

    Raises:
        InputError: tokenizer_config.json is no JSON object.
    """
    data = source.read_file("chat_template.jinja")
    if data is not None:
        return data.decode("utf-8", errors="replace")
    template = _object(source, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def own_chat_template() -> str:
    """The Jinja chat template of K3 and K3.1 for checkpoints without one: the released ones render in Python code."""
    return _TEMPLATE.read_bytes().decode("utf-8")


def chat_template_file() -> AbstractContextManager[Path]:
    """The file that holds ``own_chat_template``, for programs that take a path."""
    return as_file(_TEMPLATE)


def _front_matter(readme: bytes | None) -> tuple[dict[Any, Any], tuple[str, ...]]:
    lines = (readme or b"").decode("utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}, ()
    body = []
    size = 0
    for line in lines[1:]:
        size += len(line) + 1
        if line.strip() == "---":
            break
        if size > _LARGEST_FRONT_MATTER:
            return {}, (f"README.md: front matter above {_LARGEST_FRONT_MATTER} characters, not read",)
        body.append(line.replace("\t", "  "))
    else:
        return {}, ("README.md: front matter without an end, not read",)
    try:
        card = yaml.safe_load("\n".join(body))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, (f"README.md: front matter is not YAML, not read ({str(error).splitlines()[0]})",)
    if card is not None and not isinstance(card, dict):
        return {}, (f"README.md: front matter is a {type(card).__name__}, not a mapping; not read",)
    return card or {}, ()


def _object(source: Source, file: str) -> dict[str, Any]:
    """The JSON object in ``file``; empty when the checkpoint has no such file."""
    data = source.read_file(file)
    return {} if data is None else load_object(data, file)


def _name_or_path(source: Source) -> str | None:
    text = _text(_object(source, "config.json").get("_name_or_path"))
    # A path of the machine that saved the checkpoint is no name.
    return text if text and text.count("/") <= 1 and text[0] not in "./~" else None


def _split_id(model_id: str | None) -> tuple[str | None, str | None]:
    if model_id is None:
        return None, None
    organization, _, name = model_id.rpartition("/")
    return organization or None, name or None


def _base_model(text: str) -> BaseModel:
    path = text.removeprefix(_HUB)
    is_id = path.count("/") == 1 and not path.startswith((".", "/"))
    if not is_id:
        return BaseModel(text, None, text if text.startswith("https://") else None)
    organization, _, name = path.partition("/")
    return BaseModel(title(name), organization, _HUB + path)


def title(name: str) -> str:
    """A repository's name as a human writes it: dashes become spaces."""
    return " ".join(name.replace("-", " ").split())


def _text(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        # Half a surrogate pair is nothing that UTF-8 could hold.
        return str(value).encode(errors="replace").decode().strip() or None
    except ValueError:
        # A number of thousands of digits.
        return None


def _texts(value: object) -> tuple[str, ...]:
    """Strings of a scalar or a list; YAML reads the language code ``no`` as False."""
    items = value if isinstance(value, list) else [value]
    found = ("no" if item is False else _text(item) for item in items[:_LARGEST_LIST])
    return tuple(text for text in found if text)


def _unique(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
