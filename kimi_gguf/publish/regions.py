"""A README that a program and people write together: front matter by key, text by marked regions.

A region is what lies between ``<!-- kimi-gguf:begin NAME -->`` and ``<!-- kimi-gguf:end NAME -->``. Text outside is
never touched, and a region that somebody has removed does not come back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from quant.errors import InputError

_FRONT = re.compile(r"\A\ufeff?---[ \t]*\n(.*?\n)??---[ \t]*(?:\n|\Z)", re.DOTALL)
_MARK = re.compile(r"<!-- kimi-gguf:(begin|end) ([\w-]+) -->")


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """The front matter of a README as a mapping, and the text after it.

    Raises:
        InputError: it is no YAML mapping.
    """
    match = _FRONT.match(text)
    if match is None:
        return {}, text
    try:
        found = yaml.safe_load(match[1] or "") or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(
            f"README.md: its front matter is not YAML ({str(error).splitlines()[0]})", "repair it by hand first"
        ) from None
    if not isinstance(found, dict):
        raise InputError("README.md: its front matter is not a mapping", "repair it by hand first")
    return found, text[match.end() :]


def merge_front_matter(there: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """``ours`` where nothing is there; lists of both, what is there first. What somebody wrote is never replaced."""
    merged = dict(there)
    for key, value in ours.items():
        held = merged.get(key)
        if held is None:
            merged[key] = value
        elif isinstance(value, list):
            listed = held if isinstance(held, list) else [held]
            merged[key] = [*listed, *(item for item in value if item not in listed)]
    return merged


def join_front_matter(front: Mapping[str, Any], body: str) -> str:
    """A README of both."""
    text = yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---\n{body}"


def merge_regions(body: str, regions: Mapping[str, str]) -> str:
    """``body`` with its marked regions filled anew.

    Args:
        body: what is there; without any region, all of ``regions`` are appended to it.
        regions: text by name, in the order in which they are appended.

    Raises:
        InputError: marks that do not pair up.
    """
    places = _regions(body)
    if not places:
        parts = [body.strip("\n")] if body.strip() else []
        parts += [_marked(name, text) for name, text in regions.items()]
        return "\n\n".join(parts) + "\n"
    for name, (begin, end) in sorted(places.items(), key=lambda item: -item[1][0]):
        if name in regions:
            body = body[:begin] + _marked(name, regions[name]) + body[end:]
    return body


def _regions(body: str) -> dict[str, tuple[int, int]]:
    places: dict[str, tuple[int, int]] = {}
    opened: tuple[str, int] | None = None
    for match in _MARK.finditer(body):
        kind, name = match.groups()
        if kind == "begin":
            if opened is not None or name in places:
                raise _unpaired(name)
            opened = (name, match.start())
        else:
            if opened is None or opened[0] != name:
                raise _unpaired(name)
            places[name] = (opened[1], match.end())
            opened = None
    if opened is not None:
        raise _unpaired(opened[0])
    return places


def _marked(name: str, text: str) -> str:
    return f"<!-- kimi-gguf:begin {name} -->\n{text.strip()}\n<!-- kimi-gguf:end {name} -->"


def _unpaired(name: str) -> InputError:
    return InputError(
        f"README.md: the marks of the region {name} do not pair up",
        f"put <!-- kimi-gguf:begin {name} --> before it and <!-- kimi-gguf:end {name} --> after it, once, or neither",
    )
