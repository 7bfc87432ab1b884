"""Importance matrices: how much the square error of each column of a weight matrix matters, per expert.

The weight of a column is the mean square of the activations that it meets: the stored sum divided by the stored count,
as llama-quantize divides them. A real matrix of 92 layers of 896 experts is 3.4 GB, so values stay on disk: they are
checked in one pass when the file is opened and read again, a tensor or an expert at a time, when they are wanted.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from quant.errors import InputError
from quant.imatrix_file import StoredEntry, StoredImatrix, read_index, write_gguf
from quant.tensors import F32Array

_PIECE: Final = 1 << 20
_EMBEDDING: Final = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What an importance matrix holds.

    Attributes:
        tensors: weight matrices with an entry.
        experts: experts over all of them, where counts are kept per expert.
        neutral: number of experts that were never hit, and so get neutral weights, by tensor; only those above 0.
    """

    tensors: int
    experts: int
    neutral: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What must not change between opening the file and reading from it."""

    device: int
    inode: int
    size: int
    modified: int


class Imatrix:
    """An importance matrix on disk, checked whole. Reading is safe from several threads."""

    def __init__(
        self,
        path: Path,
        stored: StoredImatrix,
        neutral: Mapping[str, npt.NDArray[np.bool_]],
        sha256: str,
        stamp: _Stamp,
    ) -> None:
        self._path = path
        self._stored = stored
        self._neutral = neutral
        self._stamp = stamp
        self.sha256 = sha256

    @classmethod
    def load(cls, path: str | os.PathLike[str], columns: Mapping[str, int] | None = None) -> Imatrix:
        """Open and check a file in llama.cpp's GGUF form or the legacy ``.dat``.

        Args:
            path: of the file.
            columns: columns of the model's tensors by name; lets messages name an expert where the file keeps one
                count for a whole stack, as the legacy form does.

        Raises:
            InputError: not an importance matrix, cut short, or a value that is negative, infinite or NaN; names the
                tensor and the expert.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"{path} is not a file", "name one that kimi-gguf imatrix or llama-imatrix made")
        try:
            with path.open("rb") as file:
                stamp = _stamp_of(file.fileno())
                stored = read_index(path)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                neutral = {
                    name: _check_values(file.fileno(), entry, f"{path}: {name}", (columns or {}).get(name))
                    for name, entry in stored.entries.items()
                }
                if _stamp_of(file.fileno()) != stamp:
                    raise InputError(f"{path} changed while it was read", "wait until it is complete")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", "check the disk, or name another file") from None
        return cls(path, stored, neutral, sha256, stamp)

    @property
    def names(self) -> Sequence[str]:
        """Names of the weight matrices that have an entry."""
        return tuple(self._stored.entries)

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the texts that it was computed from."""
        return self._stored.datasets

    @property
    def chunk_count(self) -> int:
        """Number of chunks of text that were seen."""
        return self._stored.chunk_count

    @property
    def coverage(self) -> Coverage:
        """How much of a model the matrix covers, and which experts it never saw."""
        entries = self._stored.entries
        experts = sum(len(e.counts) for e in entries.values() if len(e.counts) > 1)
        counts = {name: int(mask.sum()) for name, mask in self._neutral.items()}
        return Coverage(len(entries), experts, {name: n for name, n in counts.items() if n})

    def __contains__(self, name: object) -> bool:
        return name in self._stored.entries

    def check(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor has an entry that it can use; reads no values.

        Args:
            name: GGUF name of the tensor.
            shape: row-major; columns last, stacked matrices first.

        Raises:
            InputError: the entry's length is not that of the tensor's columns times its stacked matrices.
        """
        entry = self._stored.entries.get(name)
        if entry is None:
            return False
        expected = shape[-1] * math.prod(shape[:-2])
        if entry.size == expected:
            return True
        if name == _EMBEDDING:
            # Rows of an embedding are looked up, not multiplied; llama.cpp drops such entries too.
            return False
        raise InputError(
            f"{self._path}: {name} has {entry.size} values, but the tensor has {expected}"
            f" ({shape[-1]} columns of {math.prod(shape[:-2])} matrices)",
            "the importance matrix is of another model",
        )

    def importance(self, name: str, shape: Sequence[int]) -> F32Array | None:
        """Weights of all columns, F32 [stacked matrices or 1, columns]; None when there is no entry.

        Experts that were never hit weigh every column 1.

        Raises:
            InputError: as ``check``, or the file changed since it was opened.
        """
        if not self.check(name, shape):
            return None
        return self._read(name, 0, self._stored.entries[name].size).reshape(-1, shape[-1])

    def importance_of(self, name: str, shape: Sequence[int], expert: int) -> F32Array | None:
        """Weights of the columns of one stacked matrix, F32 [columns]; as ``importance`` otherwise."""
        if not self.check(name, shape):
            return None
        return self._read(name, expert * shape[-1], shape[-1])

    def _read(self, name: str, begin: int, size: int) -> F32Array:
        entry = self._stored.entries[name]
        with self._path.open("rb") as file:
            if _stamp_of(file.fileno()) != self._stamp:
                raise InputError(f"{self._path} changed since it was opened", "run again with the file at rest")
            values = _pread(file.fileno(), entry.offset + 4 * begin, size)
        # Slices of equal count need not be the tensor's matrices: one count may stand for all heads of a stack.
        slices = np.arange(begin, begin + size) // (entry.size // len(entry.counts))
        one, neutral = np.float32(1), self._neutral[name]
        return np.where(neutral[slices], one, values / np.where(neutral, one, entry.counts)[slices])

    @staticmethod
    def save(
        path: str | os.PathLike[str],
        entries: Mapping[str, tuple[F32Array, F32Array]],
        *,
        datasets: Sequence[str] = (),
        chunk_count: int = 0,
        chunk_size: int = 0,
        notes: Mapping[str, str | Sequence[int]] | None = None,
    ) -> None:
        """Write llama.cpp's GGUF form.

        Args:
            path: of the file; it appears only when it is whole.
            entries: per weight matrix the sums of squared inputs, F32 [slices, columns], and counts, F32 [slices].
            datasets: names of the texts.
            chunk_count, chunk_size: how many chunks of how many tokens were seen.
            notes: further keys: texts, or lists of 32-bit numbers.
        """
        write_gguf(Path(path), entries, datasets, chunk_count, chunk_size, notes)


def _stamp_of(descriptor: int) -> _Stamp:
    status = os.fstat(descriptor)
    return _Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _pread(descriptor: int, offset: int, size: int) -> F32Array:
    data = bytearray(4 * size)
    view = memoryview(data)
    while len(view):
        n = os.preadv(descriptor, [view], offset)
        if n == 0:
            raise InputError("the importance matrix ends early", "the file changed while it was read; run again")
        view, offset = view[n:], offset + n
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def _check_values(descriptor: int, entry: StoredEntry, what: str, columns: int | None) -> npt.NDArray[np.bool_]:
    """Refuse values that cannot be; says which slices are neutral: never hit, or without any activation."""
    width = entry.size // len(entry.counts)
    silent: npt.NDArray[np.bool_] = np.ones(len(entry.counts), dtype=np.bool_)
    begin = 0
    while begin < entry.size:
        # Whole slices at a time, or a part of one that is larger than a piece.
        whole = _PIECE // width * width
        size = min(whole, entry.size - begin) if whole else min(_PIECE, width - begin % width)
        values = _pread(descriptor, entry.offset + 4 * begin, size)
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and math.isfinite(high)):
            bad = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
            expert, column = divmod(begin + bad, columns or width)
            raise InputError(
                f"{what}, expert {expert}, column {column}: {values[bad]}"
                " where a finite number that is not negative belongs",
                "the importance matrix is damaged; make it again",
            )
        first = begin // width
        used = np.logical_or.reduce(values.reshape(-1, width if whole else size), axis=1)
        silent[first : first + len(used)] &= ~used
        begin += size
    neutral: npt.NDArray[np.bool_] = silent | (entry.counts == 0)
    return neutral
