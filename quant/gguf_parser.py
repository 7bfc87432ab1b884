"""A bounded reader of GGUF headers: files of others are parsed without trusting a number in them.

Layout (GGUF v2 and v3, little endian): magic, u32 version, u64 tensor count, u64 key count; then per key a string,
a u32 type and a value; then per tensor a name, u32 n_dims, u64 dims (contiguous axis first), u32 type, u64 offset;
then padding to ``general.alignment`` and the tensor data. Every count and length is compared with the bytes that are
left before anything is allocated for it, arrays stay as compact buffers, and only the header is ever read.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from quant.errors import InputError
from quant.gguf_cursor import Cursor, Read, StringArray, decode_text
from quant.types import QuantType, block_size, nbytes

ValueType = gguf.GGUFValueType

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEY_BYTES = 1024
MAX_NAME_BYTES = 63
MAX_DIMS = 4
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16

_FIRST_READ = 1 << 16
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8

_SCALARS: dict[ValueType, np.dtype[np.generic]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


Scalar = int | float | bool | str
NumberArray = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class GgufValue:
    """One metadata value.

    Attributes:
        type: the value's GGUF type; ARRAY for arrays.
        value: int, float, bool or str; a numpy array for arrays of numbers; a ``StringArray`` for arrays of strings.
        element: the type of an array's elements, None for scalars.
    """

    type: ValueType
    value: Scalar | NumberArray | StringArray
    element: ValueType | None = None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file: row-major shape, type, absolute offset in the file, bytes."""

    name: str
    shape: tuple[int, ...]
    qtype: QuantType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one GGUF file.

    Attributes:
        file: the file's name, as messages show it.
        version: 2 or 3.
        metadata: values by key, in file order.
        tensors: tensors in file order.
        data_offset: where tensor data begins, from the start of the file (end of the header when it holds none).
        alignment: of tensor starts, bytes.
        file_size: bytes of the whole file.
    """

    file: str
    version: int
    metadata: dict[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    data_offset: int
    alignment: int
    file_size: int
    by_name: dict[str, GgufTensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {t.name: t for t in self.tensors})

    def get_int(self, key: str) -> int | None:
        """The integer under ``key``; None when the key is absent or holds something else."""
        found = self.metadata.get(key)
        if found is None or isinstance(found.value, bool) or not isinstance(found.value, int):
            return None
        return found.value

    def get_str(self, key: str) -> str | None:
        """The string under ``key``; None when the key is absent or holds something else."""
        found = self.metadata.get(key)
        return found.value if found is not None and isinstance(found.value, str) else None


def parse_gguf(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of the GGUF file at ``path``.

    Raises:
        InputError: no such regular file, not GGUF, or anything in the header that cannot be true of this file.
    """
    path = Path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(f"cannot open {path}: {error.strerror}", "name a .gguf file that can be read") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a regular file", "name a .gguf file")
        return parse_gguf_from(lambda offset, n: _pread(descriptor, offset, n), status.st_size, str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check the disk, or get the file again") from None
    finally:
        os.close(descriptor)


def parse_gguf_from(read: Read, file_size: int, file: str, *, first_read: int = _FIRST_READ) -> GgufHeader:
    """Read a GGUF header through ``read(offset, n) -> bytes``, for example by HTTP ranges.

    Args:
        read: returns exactly ``n`` bytes at ``offset``; called with ascending, adjacent ranges inside the file.
        file_size: bytes of the whole file.
        file: its name, for messages.
        first_read: bytes of the first range; later ranges double up to 8 MiB.

    Raises:
        InputError: as ``parse_gguf``.
    """
    cursor = Cursor(read, file_size, file, first_read)
    version, n_tensors, n_keys = _preamble(cursor)
    metadata = _metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    entries = _tensor_entries(cursor, n_tensors)
    data_offset = cursor.position
    if entries:
        data_offset = -(-data_offset // alignment) * alignment
    tensors = tuple(_place(cursor, entry, data_offset, alignment) for entry in entries)
    _check_overlap(cursor, tensors)
    return GgufHeader(file, version, metadata, tensors, data_offset, alignment, file_size)


def _pread(descriptor: int, offset: int, n: int) -> bytes:
    parts = []
    while n:
        part = os.pread(descriptor, n, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        n -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _preamble(cursor: Cursor) -> tuple[int, int, int]:
    magic = cursor.take(min(4, cursor.left), "the magic")
    if magic != b"GGUF":
        hint = "it is a Git LFS pointer; fetch the real file" if magic == b"vers" else "name a .gguf file"
        raise cursor.fault(f"not a GGUF file (it starts with {magic!r})", hint)
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.fault("a big-endian GGUF", "only little-endian files are read")
    if version not in (2, 3):
        raise cursor.fault(f"GGUF version {version}", "versions 2 and 3 are read")
    n_tensors = cursor.u64("the tensor count")
    n_keys = cursor.u64("the key count")
    if n_keys > MAX_KEYS or n_keys * _SMALLEST_KEY > cursor.left:
        raise cursor.fault(f"claims {n_keys} keys; {cursor.left} bytes are left, {MAX_KEYS} keys allowed")
    if n_tensors > MAX_TENSORS or n_tensors * _SMALLEST_TENSOR > cursor.left:
        raise cursor.fault(f"claims {n_tensors} tensors; {cursor.left} bytes are left, {MAX_TENSORS} tensors allowed")
    return version, n_tensors, n_keys


def _value_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.u32(f"the type of {key!r}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.fault(f"key {key!r} has the unknown type {number}") from None


def _scalar(cursor: Cursor, key: str, type_: ValueType) -> Scalar:
    if type_ is ValueType.STRING:
        return decode_text(cursor.string(f"the value of {key!r}"))
    dtype = _SCALARS[type_]
    data = cursor.take(dtype.itemsize, f"the value of {key!r}")
    if type_ is ValueType.BOOL and data not in (b"\0", b"\1"):
        raise cursor.fault(f"key {key!r} holds the byte {data[0]} where a bool is 0 or 1")
    value: Scalar = np.frombuffer(data, dtype)[0].item()
    return value


def _array(cursor: Cursor, key: str) -> GgufValue:
    element = _value_type(cursor, key)
    count = cursor.u64(f"the length of {key!r}")
    what = f"the array {key!r}"
    if element is ValueType.ARRAY:
        raise cursor.fault(f"{what} is nested", "arrays of arrays are not read, by llama.cpp neither")
    if element is ValueType.STRING:
        return GgufValue(ValueType.ARRAY, cursor.string_array(count, what), element)
    dtype = _SCALARS[element]
    if count > cursor.left // dtype.itemsize:
        raise cursor.fault(f"{what} claims {count} elements of {dtype.itemsize} bytes; {cursor.left} bytes are left")
    data = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if element is ValueType.BOOL and data.view(np.uint8).max(initial=0) > 1:
        raise cursor.fault(f"{what} holds a byte above 1 where a bool is 0 or 1")
    return GgufValue(ValueType.ARRAY, data, element)


def _metadata(cursor: Cursor, count: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for index in range(count):
        raw = cursor.string(f"key {index}")
        try:
            key = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise cursor.fault(f"key {index} is not UTF-8: {raw[:40]!r}") from None
        if not key or len(raw) > MAX_KEY_BYTES:
            raise cursor.fault(f"key {index} has {len(raw)} bytes; 1 to {MAX_KEY_BYTES} are allowed")
        if key in metadata:
            raise cursor.fault(f"the key {key!r} occurs twice")
        type_ = _value_type(cursor, key)
        if type_ is ValueType.ARRAY:
            metadata[key] = _array(cursor, key)
        else:
            metadata[key] = GgufValue(type_, _scalar(cursor, key, type_))
    return metadata


def _alignment(cursor: Cursor, metadata: dict[str, GgufValue]) -> int:
    found = metadata.get("general.alignment")
    if found is None:
        return DEFAULT_ALIGNMENT
    value = found.value
    if found.type is not ValueType.UINT32 or not isinstance(value, int):
        raise cursor.fault(f"general.alignment is {found.type.name}, not UINT32")
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fault(f"general.alignment is {value}; a power of two up to {MAX_ALIGNMENT} is expected")
    return value


_Entry = tuple[str, tuple[int, ...], QuantType, int]


def _tensor_entries(cursor: Cursor, count: int) -> list[_Entry]:
    seen: set[str] = set()
    entries = []
    for index in range(count):
        raw = cursor.string(f"the name of tensor {index}")
        if not 0 < len(raw) <= MAX_NAME_BYTES:
            raise cursor.fault(f"tensor {index} has a name of {len(raw)} bytes; 1 to {MAX_NAME_BYTES} are allowed")
        name = decode_text(raw)
        if name in seen:
            raise cursor.fault(f"the tensor {name!r} occurs twice")
        seen.add(name)
        n_dims = cursor.u32(f"the rank of {name!r}")
        if not 0 < n_dims <= MAX_DIMS:
            raise cursor.fault(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, f"the shape of {name!r}"))
        number = cursor.u32(f"the type of {name!r}")
        try:
            qtype = QuantType(number)
        except ValueError:
            raise cursor.fault(f"tensor {name!r} has the unknown type {number}") from None
        entries.append((name, dims[::-1], qtype, cursor.u64(f"the offset of {name!r}")))
    return entries


def _place(cursor: Cursor, entry: _Entry, data_offset: int, alignment: int) -> GgufTensor:
    name, shape, qtype, offset = entry
    if 0 in shape:
        raise cursor.fault(f"tensor {name!r} has the empty shape {list(shape)}")
    if shape[-1] % block_size(qtype):
        raise cursor.fault(
            f"tensor {name!r} has rows of {shape[-1]}, not a whole number of {qtype.name} blocks of {block_size(qtype)}"
        )
    if offset % alignment:
        raise cursor.fault(f"tensor {name!r} starts at {offset}, which is not a multiple of {alignment}")
    size = nbytes(qtype, shape)
    begin = data_offset + offset
    if begin + size > cursor.size:
        raise cursor.fault(
            f"tensor {name!r} needs {size} bytes at offset {begin}, but the file ends at {cursor.size}",
            "the file is cut short or damaged; get it again",
        )
    return GgufTensor(name, shape, qtype, begin, size)


def _check_overlap(cursor: Cursor, tensors: Sequence[GgufTensor]) -> None:
    ordered = sorted(tensors, key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.fault(
                f"tensors {before.name!r} and {after.name!r} overlap: "
                f"the first ends at {before.offset + before.nbytes}, the second starts at {after.offset}"
            )
