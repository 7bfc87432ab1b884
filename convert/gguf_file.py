"""Exact bytes of GGUF headers, and where tensor data lies: the one writer of model GGUF.

Layout: magic, u32 version 3, u64 tensor count, u64 key count, keys, tensor entries, zeros up to ``ALIGNMENT``; then
each tensor followed by zeros up to ``ALIGNMENT``, the last one too, so that offset[i+1] = pad(offset[i] + nbytes).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from quant.errors import InputError, UsageError
from quant.gguf_parser import MAX_DIMS, MAX_NAME_BYTES
from quant.gguf_split import MAX_SPLITS, SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from quant.types import QuantType, nbytes

ValueType = gguf.GGUFValueType

ALIGNMENT = 32
VERSION = 3

_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One key of a GGUF header.

    Attributes:
        key: full key, for example ``kimi-k31.block_count``.
        type: GGUF type of the value; ARRAY for arrays.
        value: int, float, bool, str or bytes; a sequence of those for an array.
        element: type of an array's elements, None for scalars.
    """

    key: str
    type: Any
    value: Any
    element: Any = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a header describes it: name, row-major shape, type."""

    name: str
    shape: tuple[int, ...]
    qtype: QuantType

    @property
    def nbytes(self) -> int:
        return nbytes(self.qtype, self.shape)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One GGUF file before its data: header bytes, absolute offset of each tensor, size of the whole file."""

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def padded(size: int) -> int:
    """``size`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(metadata: Sequence[MetadataEntry], tensors: Sequence[TensorEntry]) -> FileLayout:
    """Header and offsets of one file that holds ``tensors`` in this order.

    Raises:
        InputError: a tensor name that GGUF cannot carry, or a name used twice.
        UsageError: a key used twice, or a value that does not fit its type.
    """
    relative = []
    position = 0
    for tensor in tensors:
        relative.append(position)
        position += padded(tensor.nbytes)
    header = header_bytes(metadata, tensors, relative)
    return FileLayout(header, tuple(len(header) + offset for offset in relative), len(header) + position)


def lay_out_split(
    metadata: Sequence[MetadataEntry], tensors: Sequence[TensorEntry], cuts: Sequence[int]
) -> tuple[FileLayout, ...]:
    """Headers and offsets of a set of files.

    Args:
        metadata: all keys but the split keys; they go into the first file.
        tensors: every tensor, in output order.
        cuts: index of the first tensor of each file, as ``cut`` returns; one entry means one plain file
            without split keys.

    Raises:
        InputError, UsageError: as ``lay_out``.
    """
    if len(cuts) == 1:
        return (lay_out(metadata, tensors),)
    layouts = []
    for number, (begin, end) in enumerate(zip(cuts, [*cuts[1:], len(tensors)], strict=True)):
        keys = [*(metadata if number == 0 else ()), *split_keys(number, len(cuts), len(tensors))]
        layouts.append(lay_out(keys, tensors[begin:end]))
    return tuple(layouts)


def cut(metadata: Sequence[MetadataEntry], tensors: Sequence[TensorEntry], max_size: int | None) -> tuple[int, ...]:
    """Where a set of files is cut so that each, header included, stays within ``max_size`` bytes.

    A tensor that does not fit even alone gets a file of its own. Every file holds at least one tensor.

    Returns:
        index of the first tensor of each file; ``(0,)`` when all fits into one or ``max_size`` is None.

    Raises:
        UsageError: more files than GGUF names can count.
    """
    if max_size is None:
        return (0,)
    fixed = len(_preamble(0, 0)) + ALIGNMENT + len(_keys(split_keys(0, 1, 0)))
    starts = [0]
    size = fixed + len(_keys(metadata))
    filled = False
    for index, tensor in enumerate(tensors):
        need = len(_tensor_bytes(tensor, 0)) + padded(tensor.nbytes)
        if filled and size + need > max_size:
            starts.append(index)
            size = fixed
        size += need
        filled = True
    if len(starts) > MAX_SPLITS:
        raise UsageError(
            f"a limit of {max_size} bytes makes {len(starts)} files; at most {MAX_SPLITS} can be named",
            "raise --split-max-size",
        )
    return tuple(starts)


def split_keys(number: int, count: int, n_tensors: int) -> tuple[MetadataEntry, ...]:
    """The three keys of file ``number`` (0-based) of ``count``; ``n_tensors`` counts the whole set."""
    return (
        MetadataEntry(SPLIT_NO, ValueType.UINT16, number),
        MetadataEntry(SPLIT_COUNT, ValueType.UINT16, count),
        MetadataEntry(SPLIT_TENSORS, ValueType.INT32, n_tensors),
    )


def header_bytes(metadata: Sequence[MetadataEntry], tensors: Sequence[TensorEntry], offsets: Sequence[int]) -> bytes:
    """A GGUF header up to where tensor data begins, padding included.

    Args:
        metadata: keys in file order.
        tensors: tensors in file order.
        offsets: of each tensor, from the start of the tensor data.

    Raises:
        InputError, UsageError: as ``lay_out``.
    """
    _check_unique([entry.key for entry in metadata], "key", UsageError)
    _check_unique([tensor.name for tensor in tensors], "tensor name", InputError)
    entries = b"".join(_tensor_bytes(t, o) for t, o in zip(tensors, offsets, strict=True))
    header = _preamble(len(tensors), len(metadata)) + _keys(metadata) + entries
    return header.ljust(padded(len(header)), b"\0")


def value_bytes(entry: MetadataEntry) -> bytes:
    """Type and value of ``entry`` as a header holds them.

    Raises:
        UsageError: the value does not fit the type.
    """
    try:
        if entry.type is not ValueType.ARRAY:
            return struct.pack("<I", entry.type) + _scalar_bytes(entry.type, entry.value)
        head = struct.pack("<IIQ", entry.type, entry.element, len(entry.value))
        return head + _elements(entry.element, entry.value)
    except (struct.error, TypeError, ValueError, OverflowError) as error:
        kind = entry.type.name if entry.element is None else f"an array of {entry.element.name}"
        what = f"{entry.value!r:.80}" if entry.element is None else str(error)
        raise UsageError(f"the value of {entry.key} is not {kind}: {what}", "give one that fits the key") from None


def _elements(element: Any, values: Sequence[Any]) -> bytes:
    if element is ValueType.STRING:
        return b"".join(_string(value) for value in values)
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    return struct.pack(f"<{len(plain)}{_FORMATS[element]}", *plain)


def _scalar_bytes(type_: Any, value: Any) -> bytes:
    if type_ is ValueType.STRING:
        return _string(value)
    return struct.pack(f"<{_FORMATS[type_]}", value)


def _string(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def _preamble(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", VERSION, n_tensors, n_keys)


def _keys(metadata: Iterable[MetadataEntry]) -> bytes:
    return b"".join(_string(entry.key) + value_bytes(entry) for entry in metadata)


def _tensor_bytes(tensor: TensorEntry, offset: int) -> bytes:
    name = tensor.name.encode()
    rank = len(tensor.shape)
    if not 0 < len(name) <= MAX_NAME_BYTES or not 0 < rank <= MAX_DIMS:
        raise InputError(
            f"tensor {tensor.name!r}: a name of {len(name)} bytes and {rank} axes; GGUF carries names of 1 to "
            f"{MAX_NAME_BYTES} bytes and 1 to {MAX_DIMS} axes",
            "this variant of the architecture has no GGUF yet",
        )
    return _string(name) + struct.pack(f"<I{rank}QIQ", rank, *reversed(tensor.shape), tensor.qtype, offset)


def _check_unique(names: Sequence[str], what: str, error: type[InputError] | type[UsageError]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise error(f"the {what} {name!r} occurs twice")
        seen.add(name)
