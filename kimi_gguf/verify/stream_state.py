"""Arrays over all tokens of a run: in memory while they are small, in plain files once they are not.

Files are read and written with explicit calls instead of a memory map, so that resident memory is what the plan says.
"""

from __future__ import annotations

import fcntl
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convert.disk import allocated_bytes, disk_faults, free_bytes
from quant.errors import InputError, OutputError

Array = npt.NDArray[Any]
MARK = "kimi-gguf-run"
STATE = "state.npz"
_JOURNAL = "_journal"


class Rows:
    """One row per token, of a fixed width and dtype.

    Args:
        count, width: of the array.
        path: the file that holds it; None keeps it in memory. An existing file of the right size is used as it is.
    """

    def __init__(self, count: int, width: int, dtype: Any, path: Path | None) -> None:
        self.width = width
        self.dtype = np.dtype(dtype)
        self.path = path
        self._memory: Array | None = None
        self._descriptor: int | None = None
        if path is None:
            self._memory = np.zeros((count, width), dtype=self.dtype)
            return
        with disk_faults(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = count * width * self.dtype.itemsize
            if os.fstat(self._descriptor).st_size != size:
                os.ftruncate(self._descriptor, size)

    def read(self, begin: int, end: int) -> Array:
        """Rows [begin, end), an array of the caller's own."""
        if self._memory is not None:
            return self._memory[begin:end].copy()
        assert self._descriptor is not None and self.path is not None
        values: Array = np.empty((end - begin, self.width), dtype=self.dtype)
        view = memoryview(values.reshape(-1).view(np.uint8).data)
        offset = begin * self.width * self.dtype.itemsize
        while view:
            n = os.preadv(self._descriptor, [view], offset)
            if n == 0:
                raise InputError(f"{self.path} is cut short", "remove the scratch folder and start anew")
            view, offset = view[n:], offset + n
        return values

    def write(self, begin: int, values: Array) -> None:
        """Replace the rows from ``begin`` on."""
        if self._memory is not None:
            self._memory[begin : begin + len(values)] = values
            return
        assert self._descriptor is not None and self.path is not None
        data = np.ascontiguousarray(values, dtype=self.dtype)
        view = memoryview(data.reshape(-1).view(np.uint8).data)
        offset = begin * self.width * self.dtype.itemsize
        with disk_faults(self.path):
            while view:
                n = os.pwrite(self._descriptor, view, offset)
                view, offset = view[n:], offset + n

    def sync(self) -> None:
        """Wait until what was written is on disk."""
        if self._descriptor is not None and self.path is not None:
            with disk_faults(self.path):
                os.fsync(self._descriptor)

    def drop(self) -> None:
        """Free the memory, or close and remove the file."""
        self._memory = None
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and leave it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class StateFolder:
    """Where a run keeps its arrays and how far it has come; without a folder everything is in memory.

    One file, replaced whole, holds the journal and what was measured so far; it is written after all arrays that it
    names are on disk, so a run that stops anywhere continues from the last layer that was committed.

    Args:
        folder: of this run alone; None for memory.
        key: identity of the run (models, text, context, settings).
        resume: continue what the folder holds; otherwise an earlier run's files are removed.
        needed: bytes that the run will write at most.

    Raises:
        OutputError: the disk has less room than that, the folder holds files of others, or another process uses it.
        InputError: ``resume``, and the folder holds another run.
    """

    def __init__(self, folder: Path | None, key: str, *, resume: bool, needed: int) -> None:
        self.folder = folder
        self._saved: dict[str, Array] = {}
        self._rows: list[Rows] = []
        self._lock: int | None = None
        if folder is None:
            return
        mark = folder / MARK
        existed = folder.exists()
        is_new = not existed or not any(folder.iterdir())
        if not is_new and not mark.exists():
            raise OutputError(f"{folder} holds other files", "name an empty folder with --scratch DIR")
        with disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / MARK)
        try:
            # A run that was killed before it wrote its key has left nothing else either.
            if resume and not is_new and mark.stat().st_size:
                self._check_key(key)
                self._saved = self._load()
            else:
                self._empty()
            free = free_bytes(folder) + sum(allocated_bytes(path) for path in folder.iterdir())
            if free < needed:
                raise OutputError(
                    f"{folder}: hidden states may take {needed:,} bytes, {free:,} are free",
                    "name a roomier folder with --scratch DIR, or run fewer --tokens",
                )
            with disk_faults(mark):
                mark.write_text(key)
        except BaseException:
            if is_new:
                # Nothing was done here: leave nothing.
                with suppress(OSError):
                    mark.unlink()
                    if not existed:
                        folder.rmdir()
            self.close()
            raise

    def rows(self, name: str, count: int, width: int, dtype: Any = np.float32) -> Rows:
        """The array called ``name``, new or as an earlier run left it."""
        made = Rows(count, width, dtype, None if self.folder is None else self.folder / name)
        if self.folder is not None:
            self._rows.append(made)
        return made

    @property
    def journal(self) -> dict[str, Any]:
        """What was committed last; empty at the start."""
        data = self._saved.get(_JOURNAL)
        return {} if data is None else dict(json.loads(data.tobytes()))

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays that were committed last."""
        return {name: array for name, array in self._saved.items() if name != _JOURNAL}

    def commit(self, journal: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Record how far the run has come; everything that the journal names must be synced already."""
        if self.folder is None:
            return
        partial = self.folder / f"{STATE}.partial"
        packed = np.frombuffer(json.dumps(journal).encode(), dtype=np.uint8)
        with disk_faults(self.folder / STATE):
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **{_JOURNAL: packed, **arrays})
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.folder / STATE)
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        """Delete the folder and all it holds."""
        if self.folder is not None and self.folder.exists():
            # In this order, so that a removal that is cut short leaves a folder of ours that holds no run.
            with disk_faults(self.folder):
                (self.folder / STATE).unlink(missing_ok=True)
                self._empty()
                (self.folder / MARK).unlink(missing_ok=True)
                self.folder.rmdir()
        self.close()

    def close(self) -> None:
        """Close all files, and let others use the folder."""
        for rows in self._rows:
            rows.close()
        self._rows = []
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _empty(self) -> None:
        assert self.folder is not None
        for path in self.folder.iterdir():
            if path.name != MARK:
                path.unlink()

    def _check_key(self, key: str) -> None:
        assert self.folder is not None
        if (self.folder / MARK).read_text() != key:
            raise InputError(
                f"{self.folder} holds a run of other models, text or settings",
                "repeat the command that began it, or start anew without --resume",
            )

    def _load(self) -> dict[str, Array]:
        assert self.folder is not None
        path = self.folder / STATE
        if not path.exists():
            return {}
        try:
            with np.load(path, allow_pickle=False) as saved:
                return {name: saved[name] for name in saved.files}
        except (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path}: {error}", "start anew without --resume") from None


def _locked(path: Path) -> int:
    """A descriptor that holds the lock of ``path``; the operating system drops it when this process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(f"another process works in {path.parent}", "wait for it to end") from None
    return descriptor
