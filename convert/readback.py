"""Proof that a finished file is what was planned and what was written: one pass over its bytes.

The header must be the planned one, and must parse to the planned chain of tensors; each unit must have the CRC-32
that the journal took when it was written; padding must be zero. The same pass takes the SHA-256 of every tensor and
of the whole file.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from convert.domain import PlannedFile, PlannedTensor
from convert.gguf_file import ALIGNMENT, padded
from convert.journal import FileRecord
from convert.transforms import row_count
from convert.units import UnitTable
from quant.errors import InputError, OutputError
from quant.gguf_parser import parse_gguf

_BUFFER = 4 << 20


class DamagedUnits(OutputError):
    """Bytes on disk differ from those that were written; ``units`` are to be done again."""

    def __init__(self, message: str, hint: str, units: Sequence[int]) -> None:
        super().__init__(message, hint)
        self.units = units


def check_file(
    path: Path,
    planned: PlannedFile,
    tensors: Sequence[tuple[int, PlannedTensor]],
    units: UnitTable,
    checksums: Sequence[int],
    *,
    threads: int,
    checked: Callable[[int], None],
) -> FileRecord:
    """Read a complete file back.

    Args:
        path: of the partial file.
        planned: its name, header and size.
        tensors: (index in the plan, tensor) of the file's tensors, in file order.
        units: of the whole plan.
        checksums: CRC-32 of each unit by number.
        threads: with two or more, the file's hash is taken beside those of its tensors.
        checked: called with numbers of bytes as they have been read.

    Raises:
        OutputError: header, size or padding are not as planned.
        DamagedUnits: a unit's bytes are not those that were written.
    """
    check_structure(path, planned, [tensor for _, tensor in tensors])
    with path.open("rb", buffering=0) as file, _FileHash(threads > 1) as whole:
        reader = _Reader(file.fileno(), whole, checked)
        header = b"".join(bytes(part) for part in reader.parts(0, len(planned.header)))
        if header != planned.header:
            raise OutputError(f"{path}: the header on disk is not the one that was written", _AGAIN)
        hashes, damaged = [], []
        for index, tensor in tensors:
            digest = hashlib.sha256()
            position = tensor.offset
            row_bytes = tensor.nbytes // row_count(tensor.spec)
            for number in units.of_tensor(index):
                unit = units.unit(number)
                end = tensor.offset + unit.row_end * row_bytes
                checksum = 0
                for part in reader.parts(position, end):
                    digest.update(part)
                    checksum = zlib.crc32(part, checksum)
                if checksum != checksums[number]:
                    damaged.append(number)
                position = end
            if any(any(part) for part in reader.parts(position, tensor.offset + padded(tensor.nbytes))):
                raise OutputError(f"{path}: the padding after {tensor.spec.name} is not zero", _AGAIN)
            hashes.append(digest.hexdigest())
        if damaged:
            by_index = {index: tensor.spec.name for index, tensor in tensors}
            names = list(dict.fromkeys(by_index[units.tensor_of(number)] for number in damaged))
            raise DamagedUnits(
                f"{path}: {len(damaged)} units of {', '.join(names[:3])} differ from what was written: a disk fault",
                "run the same command again: they are done anew",
                damaged,
            )
        reader.finish()
        return FileRecord(whole.hexdigest(), tuple(hashes))


_AGAIN = "start again with --overwrite"


def check_structure(path: Path, planned: PlannedFile, tensors: Sequence[PlannedTensor]) -> None:
    """Compare size and descriptor chain of a file with the plan, through the bounded parser.

    Raises:
        OutputError: they differ.
    """
    try:
        header = parse_gguf(path)
    except InputError as error:
        raise OutputError(error.message, _AGAIN) from error
    if header.file_size != planned.nbytes:
        raise OutputError(f"{path} has {header.file_size} bytes; {planned.nbytes} were planned", _AGAIN)
    if len(header.tensors) != len(tensors):
        raise OutputError(f"{path} describes {len(header.tensors)} tensors; {len(tensors)} were planned", _AGAIN)
    expected = header.data_offset
    for found, want in zip(header.tensors, tensors, strict=True):
        there = (found.name, found.shape, found.qtype, found.offset, found.nbytes)
        if there != (want.spec.name, want.spec.shape, want.qtype, expected, want.nbytes) or expected != want.offset:
            raise OutputError(
                f"{path}: {found.name} lies at {found.offset}, planned was {want.spec.name} at {want.offset}"
            )
        expected += padded(want.nbytes)
    if expected != planned.nbytes or planned.nbytes % ALIGNMENT:
        raise OutputError(f"{path}: tensors end at {expected}, the file at {planned.nbytes}", _AGAIN)


class _FileHash:
    """SHA-256 of a stream, taken on a second thread if there is one."""

    def __init__(self, beside: bool) -> None:
        self._hash = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, "file hash") if beside else None

    def __enter__(self) -> _FileHash:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown()

    def update(self, part: memoryview) -> Future[None] | None:
        if self._pool:
            return self._pool.submit(self._hash.update, part)
        self._hash.update(part)
        return None

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _Reader:
    """Walks a file once, in order; every byte also goes to the file's hash."""

    def __init__(self, descriptor: int, whole: _FileHash, checked: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._whole = whole
        self._checked = checked
        self._buffer = memoryview(bytearray(_BUFFER))
        self._begin = self._end = 0
        self._hashing: Future[None] | None = None

    def parts(self, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes [begin, end) in pieces; a piece is valid until the next is asked for."""
        while begin < end:
            if begin >= self._end:
                self._fill(begin)
            piece = self._buffer[begin - self._begin : min(end, self._end) - self._begin]
            begin += len(piece)
            yield piece

    def _fill(self, begin: int) -> None:
        if self._hashing:
            self._hashing.result()
        size = os.preadv(self._descriptor, [self._buffer], begin)
        if not size:
            raise OutputError(f"the output ends at byte {begin} while it is read back", _AGAIN)
        self._begin, self._end = begin, begin + size
        self._hashing = self._whole.update(self._buffer[:size])
        self._checked(size)

    def finish(self) -> None:
        """Wait until the file's hash has seen everything."""
        if self._hashing:
            self._hashing.result()
