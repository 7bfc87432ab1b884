"""Proof that a finished file is what was planned and what was written: one pass over its bytes.

The header must be the planned one, and must parse to the planned chain of tensors; each unit must have the CRC-32C
that the journal took when it was written; padding must be zero. The same pass takes the SHA-256 of every tensor and of
the whole file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from convert.domain import PlannedFile, PlannedTensor
from convert.gguf_file import ALIGNMENT, padded
from convert.journal import FileRecord
from convert.transforms import row_count
from convert.units import UnitTable
from quant.digest import FileDigest, file_digest
from quant.errors import InputError, OutputError
from quant.gguf_parser import parse_gguf
from quant.tensors import U8Array

_BUFFER = 1 << 20


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
    checked: Callable[[int], None],
) -> FileRecord:
    """Read a complete file back.

    Args:
        path: of the partial file.
        planned: its name, header and size.
        tensors: (index in the plan, tensor) of the file's tensors, in file order.
        units: of the whole plan.
        checksums: CRC-32C of each unit by number.
        checked: called with numbers of bytes as they have been read.

    Raises:
        OutputError: header, size or padding are not as planned.
        DamagedUnits: a unit's bytes are not those that were written.
    """
    check_structure(path, planned, [tensor for _, tensor in tensors])
    digest = file_digest()
    with path.open("rb", buffering=0) as file:
        reader = _Reader(file.fileno(), checked)
        header = b""
        for part in reader.parts(0, len(planned.header)):
            digest.pass_by(part)
            header += part.tobytes()
        if header != planned.header:
            raise OutputError(f"{path}: the header on disk is not the one that was written", _AGAIN)
        hashes, damaged = [], []
        for index, tensor in tensors:
            damaged += _check_units(reader, digest, index, tensor, units, checksums)
            hashes.append(digest.end_part())
            end = tensor.offset + tensor.nbytes
            for part in reader.parts(end, tensor.offset + padded(tensor.nbytes)):
                digest.pass_by(part)
                if part.any():
                    raise OutputError(f"{path}: the padding after {tensor.spec.name} is not zero", _AGAIN)
    if damaged:
        by_index = {index: tensor.spec.name for index, tensor in tensors}
        names = list(dict.fromkeys(by_index[units.tensor_of(number)] for number in damaged))
        raise DamagedUnits(
            f"{path}: {len(damaged)} units of {', '.join(names[:3])} differ from what was written: a disk fault",
            "run the same command again: they are done anew",
            damaged,
        )
    return FileRecord(digest.end(), tuple(hashes))


def _check_units(
    reader: _Reader,
    digest: FileDigest,
    index: int,
    tensor: PlannedTensor,
    units: UnitTable,
    checksums: Sequence[int],
) -> list[int]:
    """Read one tensor; the numbers of its units that are not what was written."""
    damaged = []
    row_bytes = tensor.nbytes // row_count(tensor.spec)
    for number in units.of_tensor(index):
        unit = units.unit(number)
        begin, end = (tensor.offset + row * row_bytes for row in (unit.row_begin, unit.row_end))
        checksum = 0
        for part in reader.parts(begin, end):
            checksum = digest.take(part, checksum)
        if checksum != checksums[number]:
            damaged.append(number)
    return damaged


_AGAIN = "run the same command again: header and padding are written anew"


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
                f"{path}: {found.name} lies at {found.offset}, planned was {want.spec.name} at {want.offset}",
                _AGAIN,
            )
        expected += padded(want.nbytes)
    if expected != planned.nbytes or planned.nbytes % ALIGNMENT:
        raise OutputError(f"{path}: tensors end at {expected}, the file at {planned.nbytes}", _AGAIN)


class _Reader:
    """Walks a file once, in order."""

    def __init__(self, descriptor: int, checked: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._checked = checked
        self._buffer: U8Array = np.empty(_BUFFER, dtype=np.uint8)
        self._begin = self._end = 0

    def parts(self, begin: int, end: int) -> Iterator[U8Array]:
        """The bytes [begin, end) in pieces; a piece is valid until the next is asked for."""
        while begin < end:
            if begin >= self._end:
                self._fill(begin)
            piece = self._buffer[begin - self._begin : min(end, self._end) - self._begin]
            begin += piece.size
            yield piece

    def _fill(self, begin: int) -> None:
        size = os.preadv(self._descriptor, [self._buffer.data], begin)
        if not size:
            raise OutputError(f"the output ends at byte {begin} while it is read back", _AGAIN)
        self._begin, self._end = begin, begin + size
        self._checked(size)
