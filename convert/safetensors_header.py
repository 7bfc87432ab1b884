"""Headers of safetensors files, read with suspicion: 8-byte length, JSON, then data without gaps.

Whatever the bytes are, the result is a list of tensors that tile the file's data exactly, or one InputError.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from math import prod
from typing import Any

from convert.bounded_json import AGAIN, Cursor, decode_text
from convert.domain import SourceTensor
from quant.errors import InputError

# The safetensors library refuses longer headers; the largest in the release has 818,696 bytes.
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_LENGTH = 1024
MAX_RANK = 8
_INT64_MAX = (1 << 63) - 1
# How the safetensors library spells an entry; any other spelling takes the general, slower way to the same checks.
_USUAL_ENTRY = re.compile(
    r'\{"dtype":"(\w{1,16})","shape":\[((?:[1-9]\d{0,17},){0,7}[1-9]\d{0,17})\],'
    r'"data_offsets":\[(0|[1-9]\d{0,17}),([1-9]\d{0,17})\]\}'
)
_LFS_POINTER = b"version https://git-lfs"

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip


def parse_header(
    read: Callable[[int, int], bytes], file_name: str, file_size: int, shard: int = 0
) -> tuple[list[SourceTensor], str]:
    """Tensors of one safetensors file, in the order of their data, and the SHA-256 of its JSON header.

    Args:
        read: ``read(offset, length)`` gives that many bytes of the file (fewer only at its end).
        file_name: for messages.
        file_size: bytes of the whole file.
        shard: index that the tensors carry.

    Raises:
        InputError: the file is truncated, or its header is not a sound description of the file.
    """
    header = _header_bytes(read, file_name, file_size)
    cursor = Cursor(decode_text(header, f"{file_name} (header)"), file_name)
    base = 8 + len(header)
    tensors: dict[str, SourceTensor] = {}
    shapes = _Shapes()
    for name in cursor.members():
        if name == "__metadata__":
            cursor.skip_value()
            continue
        _check_name(name, file_name)
        if name in tensors:
            cursor.fail(f"tensor {name} occurs twice in the header")
        dtype, shape, begin, end = _entry(cursor, name, shapes)
        tensors[name] = SourceTensor(name, dtype, shape, shard, base + begin, base + end)
    cursor.finish()
    ordered = sorted(tensors.values(), key=lambda t: (t.begin, t.end))
    _check_tiling(ordered, file_name, base, file_size)
    return ordered, hashlib.sha256(header).hexdigest()


def _header_bytes(read: Callable[[int, int], bytes], file: str, file_size: int) -> bytes:
    prefix = read(0, 8)
    if len(prefix) < 8 or file_size < 8:
        raise InputError(f"{file}: {file_size} bytes, a safetensors file has at least 8", "download this shard again")
    length = int.from_bytes(prefix, "little")
    if read(0, len(_LFS_POINTER)) == _LFS_POINTER:
        raise InputError(
            f"{file}: a Git LFS pointer of {file_size} bytes, not the shard", "fetch it with: git lfs pull"
        )
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"{file}: header length {length} is above {MAX_HEADER_BYTES}",
            "this is not a safetensors file, or it is damaged",
        )
    if 8 + length > file_size:
        raise InputError(
            f"{file}: truncated: the header needs {8 + length} bytes, the file has {file_size}",
            "download this shard again",
        )
    header = read(8, length)
    if len(header) != length:
        raise InputError(f"{file}: read {len(header)} of {length} header bytes", "download this shard again")
    return header


def _check_name(name: str, file: str) -> None:
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InputError(f"{file}: tensor name of {len(name)} characters, expected 1 to {MAX_NAME_LENGTH}", AGAIN)
    if not name.isprintable():
        raise InputError(f"{file}: tensor name {name!a} holds control characters", AGAIN)


class _Shapes:
    """Shapes by their text and by their value, so that equal ones are one object: a release has a dozen."""

    def __init__(self) -> None:
        self._by_text: dict[str, tuple[int, ...]] = {}
        self._by_value: dict[tuple[int, ...], tuple[int, ...]] = {}

    def parse(self, text: str) -> tuple[int, ...]:
        shape = self._by_text.get(text)
        if shape is None:
            shape = self._by_text[text] = self.shared(tuple(map(int, text.split(","))))
        return shape

    def shared(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._by_value.setdefault(shape, shape)


def _entry(cursor: Cursor, name: str, shapes: _Shapes) -> tuple[str, tuple[int, ...], int, int]:
    what = f"tensor {name}"
    usual = cursor.take(_USUAL_ENTRY)
    if usual is not None:
        dtype, shape, begin, end = usual[1], shapes.parse(usual[2]), int(usual[3]), int(usual[4])
    else:
        dtype, shape, begin, end = _general_entry(cursor, what)
        shape = shapes.shared(shape)
    if dtype not in DTYPE_BITS:
        cursor.fail(f"{what} has the unknown dtype {dtype!r:.80}")
    if begin > end:
        cursor.fail(f"{what} has data_offsets [{begin}, {end}], expected begin <= end")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        cursor.fail(f"{what} is {dtype} {list(shape)}: {-(-bits // 8)} bytes, but its data has {end - begin}")
    return sys.intern(dtype), shape, begin, end


def _general_entry(cursor: Cursor, what: str) -> tuple[str, tuple[int, ...], int, int]:
    entry = cursor.flat_object(what)
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        cursor.fail(f"{what} has the members {sorted(entry)!r:.200}, expected data_offsets, dtype, shape")
    dtype = entry["dtype"]
    if not isinstance(dtype, str):
        cursor.fail(f"{what} has the dtype {dtype!r:.80}, expected a name")
    shape = _sizes(cursor, what, "shape", entry["shape"])
    if len(shape) > MAX_RANK:
        cursor.fail(f"{what} has {len(shape)} dimensions, at most {MAX_RANK} are read")
    offsets = _sizes(cursor, what, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2:
        cursor.fail(f"{what} has {len(offsets)} data_offsets, expected begin and end")
    return dtype, shape, offsets[0], offsets[1]


def _sizes(cursor: Cursor, what: str, member: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(v) is not int or not 0 <= v <= _INT64_MAX for v in value):
        cursor.fail(f"{what} has the {member} {value!r:.80}, expected whole numbers from 0 to 2^63 - 1")
    return tuple(value)


def _check_tiling(ordered: list[SourceTensor], file: str, base: int, file_size: int) -> None:
    """Data must start after the header, have neither gap nor overlap, and end with the file."""
    at, before = base, "the header"
    for tensor in ordered:
        if tensor.begin != at:
            kind = "overlaps" if tensor.begin < at else "leaves a gap after"
            raise InputError(
                f"{file}: tensor {tensor.name} {kind} {before}: it begins at byte {tensor.begin}, expected {at}",
                AGAIN,
            )
        at, before = tensor.end, f"tensor {tensor.name}"
    if at > file_size:
        raise InputError(
            f"{file}: truncated: the header describes {at} bytes, the file has {file_size}", "download this shard again"
        )
    if at < file_size:
        raise InputError(
            f"{file}: the header describes {at} bytes, the file has {file_size}", "download this shard again"
        )
