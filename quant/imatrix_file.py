"""The two forms in which llama.cpp stores an importance matrix, read with suspicion, and a writer of the newer one.

GGUF form: ``general.type`` "imatrix", ``imatrix.datasets``, ``imatrix.chunk_count``, ``imatrix.chunk_size``, and per
weight matrix ``NAME.in_sum2`` F32 (sums of squared inputs, a row per expert or all in one) and ``NAME.counts`` F32.
Legacy form: i32 number of entries; per entry i32 length, name, i32 calls, i32 number of values, F32 values; then,
optional, i32 chunks, i32 length and name of the data set. Both are little endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from quant.errors import InputError
from quant.gguf_cursor import StringArray, decode_text
from quant.gguf_parser import GgufHeader, parse_gguf
from quant.tensors import F32Array
from quant.types import QuantType

MAX_NAME_BYTES: Final = 1024
SUMS: Final = ".in_sum2"
COUNTS: Final = ".counts"

_ALIGNMENT: Final = 32
_I32 = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Where the sums of one weight matrix lie.

    Attributes:
        offset: of the F32 values, from the start of the file.
        size: number of values.
        counts: F32 [slices]; what each slice of ``size / slices`` values is to be divided by.
    """

    offset: int
    size: int
    counts: F32Array


@dataclass(frozen=True, slots=True)
class StoredImatrix:
    """An importance matrix file as it lies on disk."""

    entries: dict[str, StoredEntry]
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int
    legacy: bool


def read_index(path: Path) -> StoredImatrix:
    """Where everything is in the file at ``path``; its values are not read.

    Raises:
        InputError: not an importance matrix, cut short, or counts that cannot be.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                file.seek(0)
                return _read_legacy(file.fileno(), os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check the disk, or name another file") from None
    return _read_gguf(path, parse_gguf(path))


def _read_gguf(path: Path, header: GgufHeader) -> StoredImatrix:
    entries = {}
    for tensor in header.tensors:
        if tensor.qtype is not QuantType.F32:
            continue
        name = tensor.name.removesuffix(SUMS)
        if name == tensor.name:
            continue
        counts = header.by_name.get(name + COUNTS)
        if counts is None or counts.qtype is not QuantType.F32:
            raise InputError(f"{path}: {tensor.name} has no F32 tensor {name + COUNTS} beside it", _AGAIN)
        size, slices = tensor.nbytes // 4, counts.nbytes // 4
        if size % slices:
            raise InputError(f"{path}: {tensor.name} holds {size} values, which {slices} counts do not divide", _AGAIN)
        entries[name] = StoredEntry(tensor.offset, size, _read_counts(path, name, counts.offset, slices))
    if not entries:
        kind = header.get_str("general.type") or header.get_str("general.architecture") or "something else"
        raise InputError(f"{path} holds no importance matrix (it is: {decode_text(kind.encode())})", _AGAIN)
    datasets = header.metadata.get("imatrix.datasets")
    names = tuple(datasets.value) if datasets is not None and isinstance(datasets.value, StringArray) else ()
    chunks, size = (header.get_int(f"imatrix.chunk_{key}") or 0 for key in ("count", "size"))
    return StoredImatrix(entries, names, chunks, size, legacy=False)


_AGAIN: Final = "make it with kimi-gguf imatrix or llama-imatrix, or name another file"


def _read_counts(path: Path, name: str, offset: int, slices: int) -> F32Array:
    with path.open("rb") as file:
        counts = np.frombuffer(os.pread(file.fileno(), slices * 4, offset), dtype="<f4")
    if not np.isfinite(counts).all() or (counts < 0).any():
        bad = int(np.flatnonzero(~np.isfinite(counts) | (counts < 0))[0])
        raise InputError(f"{path}: the count of {name}, expert {bad}, is {counts[bad]}", _AGAIN)
    # Halves are rounded away from zero, as lround does; counts are whole in every file that llama-imatrix writes.
    return np.floor(counts.astype(np.float64) + 0.5).astype(np.float32)


class _Legacy:
    """A position in a legacy file; nothing is read that the file does not hold."""

    def __init__(self, descriptor: int, size: int, file: str) -> None:
        self.descriptor = descriptor
        self.size = size
        self.file = file
        self.position = 0

    def skip(self, n: int, what: str) -> int:
        """Step over ``n`` bytes; where they begin."""
        begin = self.position
        if n < 0 or n > self.size - begin:
            raise InputError(
                f"{self.file}: {what} needs {n} bytes at offset {begin}, but the file ends at {self.size}",
                "it is cut short, or no importance matrix; " + _AGAIN,
            )
        self.position = begin + n
        return begin

    def take(self, n: int, what: str) -> bytes:
        return os.pread(self.descriptor, n, self.skip(n, what))

    def i32(self, what: str) -> int:
        return int(_I32.unpack(self.take(4, what))[0])

    def text(self, what: str, limit: int) -> str:
        length = self.i32(f"the length of {what}")
        if not 0 <= length <= limit:
            raise InputError(f"{self.file}: {what} has {length} bytes; up to {limit} are allowed", _AGAIN)
        return decode_text(self.take(length, what))


def _read_legacy(descriptor: int, size: int, file: str) -> StoredImatrix:
    at = _Legacy(descriptor, size, file)
    count = at.i32("the number of entries")
    if not 0 < count <= size // 16:
        raise InputError(f"{file}: {count} entries in {size} bytes: not an importance matrix", _AGAIN)
    entries: dict[str, StoredEntry] = {}
    for index in range(count):
        name = at.text(f"the name of entry {index}", MAX_NAME_BYTES)
        if not name or name in entries:
            raise InputError(f"{file}: entry {index} is called {name!r}, which is empty or there already", _AGAIN)
        calls, n_values = at.i32(f"the calls of {name}"), at.i32(f"the number of values of {name}")
        if n_values < 1:
            raise InputError(f"{file}: {name} claims {n_values} values", _AGAIN)
        offset = at.skip(4 * n_values, f"the values of {name}")
        # Without calls the values stand as they are.
        entries[name] = StoredEntry(offset, n_values, np.array([max(calls, 1)], dtype=np.float32))
    chunks = at.i32("the number of chunks") if at.position < size else 0
    dataset = at.text("the name of the data set", 1 << 16) if at.position < size else ""
    return StoredImatrix(entries, (dataset,) if dataset else (), chunks, 0, legacy=True)


def write_gguf(
    path: Path,
    entries: Mapping[str, tuple[F32Array, F32Array]],
    datasets: Sequence[str],
    chunk_count: int,
    chunk_size: int,
    notes: Mapping[str, str | Sequence[int]] | None = None,
) -> None:
    """Write the GGUF form; the file appears under its name only when it is whole.

    Args:
        path: of the file.
        entries: per weight matrix its sums F32 [slices, columns] and counts F32 [slices].
        datasets: names of the texts.
        chunk_count, chunk_size: how many chunks of how many tokens were seen.
        notes: further keys, which other readers pass over: texts, or lists of 32-bit numbers.
    """
    arrays = {}
    for name in sorted(entries):
        sums, counts = entries[name]
        arrays[name + SUMS] = np.ascontiguousarray(sums, dtype="<f4")
        arrays[name + COUNTS] = np.ascontiguousarray(counts, dtype="<f4").reshape(-1, 1)
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(arrays), 4 + len(notes or {})))
    text, uint32 = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32
    header += _text("general.type") + struct.pack("<I", text) + _text("imatrix")
    header += _text("imatrix.datasets") + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, text, len(datasets))
    for dataset in datasets:
        header += _text(dataset)
    header += _text("imatrix.chunk_count") + struct.pack("<II", uint32, chunk_count)
    header += _text("imatrix.chunk_size") + struct.pack("<II", uint32, chunk_size)
    for key, value in (notes or {}).items():
        if isinstance(value, str):
            header += _text(key) + struct.pack("<I", text) + _text(value)
        else:
            header += _text(key) + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, uint32, len(value))
            header += np.asarray(value, dtype="<u4").tobytes()
    offset = 0
    for name, array in arrays.items():
        dims = array.shape[::-1]
        header += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, QuantType.F32, offset)
        offset += _padded(array.nbytes)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(header.ljust(_padded(len(header)), b"\0"))
            for array in arrays.values():
                file.write(array.tobytes().ljust(_padded(array.nbytes), b"\0"))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _padded(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data
