"""Text recipes: the type of every tensor, written so that people can read, change and compare them.

One line per name and type, ``NAME = TYPE``; tensors that differ only in their layer share a line, the layers as
numbers and ranges::

    # 1,099,998,412,800 bytes
    output.weight = Q6_K
    blk.1-10,81-92.ffn_down_exps.weight = Q4_K
    blk.11-80.ffn_down_exps.weight = Q3_K

``#`` starts a comment. A recipe names every tensor whose type can be chosen; vectors, norms, convolutions and routers
are F32 in every file and are not named.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from quant.errors import UsageError
from quant.types import QuantType, parse_type

MAX_BYTES: Final = 1 << 20
MAX_TENSORS: Final = 1 << 16
MAX_LAYER: Final = 9999

_NAME = re.compile(r"blk\.(\d+)\.(.+)")
_LINE = re.compile(r"(\S+)\s*=\s*(\S+)")
_LAYERS = re.compile(r"blk\.([\d,-]+)\.(.+)")
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_EXAMPLE: Final = "as in: blk.1-10.ffn_down.weight = Q4_K"


class ReadRecipe(dict[str, QuantType]):
    """Types by tensor name as a text gave them, and where it did.

    Attributes:
        places: file and line by tensor name.
    """

    def __init__(self, types: Mapping[str, QuantType], places: Mapping[str, str]) -> None:
        super().__init__(types)
        self.places = dict(places)


def write_recipe(assignments: Mapping[str, QuantType], comment: str = "") -> str:
    """The text of a recipe.

    Args:
        assignments: types by tensor name, without those that are F32 in every file.
        comment: put on top, a line each behind ``#``.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    layers: dict[tuple[str, QuantType], list[int]] = {}
    for name, qtype in sorted(assignments.items()):
        found = _NAME.fullmatch(name)
        if found is None:
            lines.append(f"{name} = {qtype.name}")
        else:
            layers.setdefault((found[2], qtype), []).append(int(found[1]))
    stems = sorted(layers.items(), key=lambda item: (item[0][0], min(item[1])))
    lines += [f"blk.{layer_ranges(sorted(numbers))}.{stem} = {qtype.name}" for (stem, qtype), numbers in stems]
    return "\n".join(lines) + "\n"


def load_recipe(path: Path) -> ReadRecipe:
    """``read_recipe`` of a file.

    Raises:
        UsageError: as ``read_recipe``; or the file cannot be read, or is no text.
    """
    try:
        with path.open("rb") as file:
            # Whatever is named, a model of many gigabytes for example, no more than this is read.
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = f"the recipe {path} cannot be read: {error.strerror}"
        raise UsageError(reason, "name a file that --target-size wrote") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is no recipe: it has more than {MAX_BYTES:,} bytes", _EXAMPLE)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: this is no text", _EXAMPLE) from None
    return read_recipe(text, str(path))


def read_recipe(text: str, file: str = "recipe") -> ReadRecipe:
    """Types by tensor name.

    Args:
        text: a recipe.
        file: its name, for messages.

    Raises:
        UsageError: a line that is no assignment, an unknown type, a tensor that is named twice, or a text beyond
            any model; names file and line.
    """
    if len(text) > MAX_BYTES:
        raise UsageError(f"{file}: {len(text)} characters; a recipe has up to {MAX_BYTES}")
    table: dict[str, QuantType] = {}
    places: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"{file}, line {number}"
        found = _LINE.fullmatch(content)
        if found is None:
            raise UsageError(f"{where}: {content[:80]!r} is not NAME = TYPE", _EXAMPLE)
        try:
            qtype = parse_type(found[2])
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}", error.hint) from None
        for name in _names(found[1], where):
            if name in table:
                raise UsageError(
                    f"{where}: {name} has a type already, {table[name].name} ({places[name]})", "remove one of the two"
                )
            table[name] = qtype
            places[name] = where
        if len(table) > MAX_TENSORS:
            raise UsageError(f"{where}: more than {MAX_TENSORS} tensors")
    if not table:
        raise UsageError(f"{file} names no tensor", _EXAMPLE)
    return ReadRecipe(table, places)


def layer_ranges(numbers: Sequence[int]) -> str:
    """Ascending layer numbers as ``1-10,92``."""
    parts = []
    # Consecutive numbers keep their distance from their place in the list.
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ",".join(parts)


def _names(pattern: str, where: str) -> Iterator[str]:
    found = _LAYERS.fullmatch(pattern)
    if found is None:
        if pattern.startswith("blk."):
            raise UsageError(f"{where}: {pattern!r} has no layer numbers", "as in: blk.1-10,92.ffn_down.weight")
        yield pattern
        return
    for part in found[1].split(","):
        span = _RANGE.fullmatch(part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise UsageError(f"{where}: {part!r} is no layer and no range of layers up to {MAX_LAYER}")
        for layer in range(int(span[1]), int(span[2] or span[1]) + 1):
            yield f"blk.{layer}.{found[2]}"
