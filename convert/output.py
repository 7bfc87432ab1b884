"""The files of a conversion on disk: names while they grow, names when they are done, room for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

from convert.disk import allocated_bytes, disk_faults, free_bytes
from convert.domain import PlannedFile
from quant.errors import OutputError

PARTIAL = ".partial"
JOURNAL = ".journal"
MANIFEST = ".manifest.json"
_SIDE_FILES = 1 << 20
_BYTES_PER_UNIT_RECORD = 24


class OutputSet:
    """The output files of a plan in one directory.

    Args:
        directory: where they go.
        stem: name of the whole set, for example ``Kimi-K3-Q4_K_M.gguf``; journal and manifest are named after it.
        files: the planned files.
    """

    def __init__(self, directory: Path, stem: str, files: Sequence[PlannedFile]) -> None:
        self.directory = directory
        self.files = files
        self.journal = directory / (stem + JOURNAL)
        self.manifest = directory / (stem + MANIFEST)
        self._open: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._lock = Lock()
        self._sync_lock = Lock()

    def final(self, index: int) -> Path:
        return self.directory / self.files[index].name

    def partial(self, index: int) -> Path:
        return self.directory / (self.files[index].name + PARTIAL)

    def is_whole(self, path: Path, index: int) -> bool:
        """Whether ``path`` is a file of the planned size."""
        try:
            return path.stat().st_size == self.files[index].nbytes
        except FileNotFoundError:
            return False

    def check_room(self, indices: Iterable[int], units: int) -> None:
        """Compare free space with what the files ``indices`` still need.

        Raises:
            OutputError: too little; names the directory and both numbers.
        """
        need = sum(max(self.files[i].nbytes - allocated_bytes(self.partial(i)), 0) for i in indices)
        need += _SIDE_FILES + units * _BYTES_PER_UNIT_RECORD
        free = free_bytes(self.directory)
        if need > free:
            raise OutputError(
                f"{self.directory} has {free:,} bytes free; {need:,} are needed",
                "free some space, choose a smaller --quant, or write to another filesystem",
            )

    def prepare(self, index: int, padding: Iterable[tuple[int, int]]) -> None:
        """Make the partial file: full size, header and padding in place, all that it held between them kept.

        Args:
            padding: (begin, end) of the zeros after each tensor; the file may be what another plan or a fault left.
        """
        path = self.partial(index)
        with disk_faults(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(descriptor, self.files[index].nbytes)
                _write(descriptor, self.files[index].header, 0)
                for begin, end in padding:
                    _write(descriptor, bytes(end - begin), begin)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(self, index: int, data: bytes | memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` of the partial file."""
        with disk_faults(self.partial(index)):
            _write(self._descriptor(index), data, offset)
        with self._lock:
            self._dirty.add(index)

    def sync(self) -> None:
        """Make everything that was written durable."""
        # A second caller waits for what the first is syncing, as it may rely on that.
        with self._sync_lock:
            with self._lock:
                dirty, self._dirty = self._dirty, set()
            for index in dirty:
                with disk_faults(self.partial(index)):
                    os.fsync(self._descriptor(index))

    def finish(self, index: int) -> Path:
        """Give a complete file its final name."""
        descriptor = self._open.pop(index, None)
        with disk_faults(self.final(index)):
            if descriptor is not None:
                os.close(descriptor)
            self.partial(index).replace(self.final(index))
            sync_directory(self.directory)
        return self.final(index)

    def _descriptor(self, index: int) -> int:
        """The open partial file; opened at its first use, as a set may have more files than a process may open."""
        with self._lock:
            if index not in self._open:
                self._open[index] = os.open(self.partial(index), os.O_RDWR | os.O_CLOEXEC)
            return self._open[index]

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def discard(self, names: Iterable[str]) -> None:
        """Remove the partial files of a discarded conversion."""
        for name in names:
            (self.directory / Path(name).name).with_name(Path(name).name + PARTIAL).unlink(missing_ok=True)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name, then rename it."""
    temporary = path.with_name(path.name + ".tmp")
    with disk_faults(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
