"""Split GGUF: how the files of a set are named, and reading a whole set from any one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quant.errors import InputError
from quant.gguf_parser import GgufHeader, GgufTensor, GgufValue, parse_gguf

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"
MAX_SPLITS = 99_999
_AGAIN = "get the file again, or make it again"
_MIXED = "put the files of one conversion, and no others, into one folder"

_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufSet:
    """The headers of one model: a single file, or all files of a split set in their order.

    Attributes:
        paths: the files.
        headers: their headers, in the same order; all metadata but the split keys is in the first.
    """

    paths: tuple[Path, ...]
    headers: tuple[GgufHeader, ...]

    @property
    def metadata(self) -> dict[str, GgufValue]:
        return self.headers[0].metadata

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        return tuple(tensor for header in self.headers for tensor in header.tensors)


def split_name(prefix: str, number: int, count: int) -> str:
    """Name of file ``number`` (0-based) of ``count``, as llama.cpp spells it: ``prefix-00001-of-00003.gguf``."""
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


def parse_split_name(name: str) -> tuple[str, int, int] | None:
    """Prefix, 0-based number and count in a split file's name; None when ``name`` is not one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match["prefix"], int(match["number"]) - 1, int(match["count"])


def read_gguf_set(
    path: Path,
    parse: Callable[[Path], GgufHeader] = parse_gguf,
    is_there: Callable[[Path], bool] = Path.is_file,
) -> GgufSet:
    """Read the headers of the model that the file at ``path`` belongs to.

    Args:
        path: a single GGUF, or any file of a split set.
        parse: reads the header of a file; of one that is not on disk, for example.
        is_there: whether there is such a file.

    Raises:
        InputError: a file of the set is missing or unreadable, or the split keys of the files contradict their
            names, each other, or the tensors present.
    """
    header = parse(path)
    if SPLIT_COUNT not in header.metadata:
        return GgufSet((path,), (header,))
    paths = _siblings(path, header)
    missing = [p.name for p in paths if not is_there(p)]
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(paths)} files of the set are missing, first {missing[0]}",
            "put all files of the set into one folder",
        )
    headers = tuple(header if p == path else parse(p) for p in paths)
    _check_set(headers)
    return GgufSet(paths, headers)


def _siblings(path: Path, header: GgufHeader) -> tuple[Path, ...]:
    count = header.get_int(SPLIT_COUNT)
    number = header.get_int(SPLIT_NO)
    if count is None or number is None or not 0 <= number < count <= MAX_SPLITS:
        raise InputError(f"{path}: {SPLIT_NO} {number} and {SPLIT_COUNT} {count} do not describe a split file", _AGAIN)
    named = parse_split_name(path.name)
    if named is None and count == 1:
        return (path,)
    if named is None or named[1:] != (number, count):
        expected = split_name("NAME", number, count)
        raise InputError(
            f"{path}: the keys say file {number + 1} of {count}, the name does not", f"rename it to {expected}"
        )
    return tuple(path.with_name(split_name(named[0], n, count)) for n in range(count))


def _check_set(headers: tuple[GgufHeader, ...]) -> None:
    count = len(headers)
    total = sum(len(h.tensors) for h in headers)
    seen: dict[str, str] = {}
    for number, header in enumerate(headers):
        found = (header.get_int(SPLIT_NO), header.get_int(SPLIT_COUNT))
        if found != (number, count):
            raise InputError(
                f"{header.file}: {SPLIT_NO} {found[0]} and {SPLIT_COUNT} {found[1]}, where {number} and {count} belong",
                _MIXED,
            )
        claimed = header.get_int(SPLIT_TENSORS)
        if claimed != total:
            raise InputError(f"{header.file}: {SPLIT_TENSORS} is {claimed}, but the set holds {total} tensors", _MIXED)
        for tensor in header.tensors:
            if tensor.name in seen:
                raise InputError(f"{header.file}: the tensor {tensor.name!r} is also in {seen[tensor.name]}", _MIXED)
            seen[tensor.name] = header.file
