"""Flags of the verbs as values: sizes, types, patterns, and the rules between them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from convert.overrides import parse_override
from convert.plan import Choices, label
from quant.errors import UsageError
from quant.gguf_split import parse_split_name
from quant.recipe_file import load_recipe
from quant.recipes import resolve
from quant.types import QuantType, parse_type

PathLike = str | os.PathLike[str]

DEFAULT_SPLIT = "48G"
ENCODERS = ("ggml", "native")
# What a file system takes, 255 bytes, less the numbers of a split file and the longest suffix of a file beside it.
_LONGEST_NAME_BYTES = 220
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of ``48G``, ``500MB``, ``1.5T``, ``44GiB`` or a plain number, in any case.

    G and GB are 1e9, as llama.cpp's splitter has it; GiB is 2**30.

    Raises:
        UsageError: another spelling, or nothing.
    """
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise UsageError(
                f"{text!r:.80} is not a size",
                "write bytes, or a number with K, M, G or T: 48G is 48e9 bytes, 48GiB is 48 x 2^30",
            )
        power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
        size = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power)
    if size <= 0:
        raise UsageError(f"a size of {text} leaves no room for anything", "give for example 48G")
    return size


def parse_tensor_type(text: str) -> tuple[str, QuantType]:
    """``REGEX=TYPE`` as a pair.

    Raises:
        UsageError: another spelling, an unknown type, or not a regular expression.
    """
    pattern, equals, type_name = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"{text!r} is not REGEX=TYPE", "for example --tensor-type 'ffn_down_exps=Q5_K'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is not a regular expression: {error}", "for example --tensor-type 'ffn_down_exps=Q5_K'"
        ) from None
    return pattern, parse_type(type_name)


def choices_from_flags(
    *,
    quant: str | None,
    recipe: PathLike | None = None,
    target_size: str | int | None = None,
    outfile: PathLike | None,
    outdir: PathLike | None,
    split_max_size: str | int | None,
    name: str | None,
    tensor_type: Sequence[str],
    output_tensor_type: str | None,
    token_embedding_type: str | None,
    override_kv: Sequence[str],
    encoder: str,
    no_fallback: bool,
    force: bool,
) -> tuple[Path, Choices]:
    """The folder to write to, and all else that the flags of ``convert`` and ``plan`` say.

    Raises:
        UsageError: a flag that cannot be read, or flags that make no sense together.
    """
    if outfile is not None and outdir is not None:
        raise UsageError("--outfile and --outdir exclude each other", "name one file, or a folder for several")
    if name is not None and not name.isprintable():
        raise UsageError(f"--name {name!a:.200} holds characters that cannot be shown", "give plain text")
    if encoder not in ENCODERS:
        raise UsageError(f"unknown encoder {encoder!r}", f"known: {', '.join(ENCODERS)}")
    recipe_name, table, budget = _types(quant, recipe, target_size)
    file = None if outfile is None else Path(outfile)
    if file is not None:
        _check_outfile(file)
    limit = split_max_size if split_max_size is not None or file is not None else DEFAULT_SPLIT
    choices = Choices(
        quant=recipe_name,
        file_name=None if file is None else file.name,
        split_max_size=None if limit is None else parse_size(limit),
        name=name,
        tensor_types=tuple(map(parse_tensor_type, tensor_type)),
        output_type=None if output_tensor_type is None else parse_type(output_tensor_type),
        embedding_type=None if token_embedding_type is None else parse_type(token_embedding_type),
        overrides=tuple(map(parse_override, override_kv)),
        encoder=encoder,
        allow_fallback=not no_fallback,
        force=force,
        table=table,
        target_size=budget,
    )
    return (Path(outdir or ".") if file is None else file.parent), choices


def _types(
    quant: str | None, recipe: PathLike | None, target_size: str | int | None
) -> tuple[str, Mapping[str, QuantType] | None, int | None]:
    """What decides the types: name of the result, table of a text recipe, bytes to stay within."""
    flags = {"--quant": quant, "--recipe": recipe, "--target-size": target_size}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) != 1:
        raise UsageError(
            " and ".join(given) + " exclude each other" if given else "nothing says which types to write",
            "give one of --quant TYPE, --recipe FILE and --target-size N(G|T)",
        )
    if recipe is not None:
        file = Path(recipe)
        return label(file.name.removesuffix(".recipe")), load_recipe(file), None
    if target_size is not None:
        return label(str(target_size)), None, parse_size(target_size)
    return resolve(quant or "").name, None, None


def _check_outfile(file: Path) -> None:
    if file.is_dir():
        raise UsageError(f"{file} is a folder", f"name a file, or give --outdir {file}")
    if file.suffix != ".gguf":
        raise UsageError(f"{file.name} does not end in .gguf", f"name it {file.name}.gguf")
    if len(os.fsencode(file.name)) > _LONGEST_NAME_BYTES:
        raise UsageError(
            f"the name of --outfile has {len(os.fsencode(file.name))} bytes, at most {_LONGEST_NAME_BYTES} leave room "
            "for those of the files beside it",
            "choose a shorter one",
        )
    if parse_split_name(file.name):
        raise UsageError(
            f"{file.name} is a name for a part of a split set", "name the whole; parts are numbered by --split-max-size"
        )
