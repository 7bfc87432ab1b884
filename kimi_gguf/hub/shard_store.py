"""Shards on disk while they are needed: fetched into a folder of their own, checked, and removed.

A shard that is being fetched is ``NAME.HASH.part``; what is there of it after an interruption is hashed again and
continued. It gets its name once its hash is the Hub's. A marker file says whose folder it is, and is the lock of the
process that works in it; a folder that holds other things is not touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from convert.disk import allocated_bytes, disk_faults
from kimi_gguf.hub.repository import WHOLE_TRIES, HubFile, Repository, wrong_bytes
from quant.errors import OutputError, UsageError

MARKER = ".kimi-gguf-shards"
_PART = re.compile(r"\.[0-9a-f]{12}\.part")
_CHUNK = 1 << 22

Advance = Callable[[int], object]


class ShardStore:
    """The shards of one repository in ``directory``, which is made and locked at the first fetch.

    Args:
        repository: where they come from.
        directory: an empty or new folder, or that of an earlier run.
        keep: shards stay after use, in this run and in later ones; so they do in a folder of an earlier run that kept.
        fetched: told the number of bytes that came.
    """

    def __init__(self, repository: Repository, directory: Path, *, keep: bool, fetched: Advance) -> None:
        self.directory = directory
        self.keep = keep or bool(_read_marker(directory / MARKER).get("keep"))
        self.fetched = fetched
        self._repository = repository
        self._lock: int | None = None

    def path(self, file: HubFile) -> Path:
        return self.directory / file.path

    def part(self, file: HubFile) -> Path:
        return self.directory / f"{file.path}.{file.hash[:12]}.part"

    def on_disk(self, file: HubFile) -> int:
        """Bytes that a shard, or a part of it, takes on disk now."""
        return allocated_bytes(self.path(file)) + allocated_bytes(self.part(file))

    def open(self) -> None:
        """Make the folder and lock it.

        Raises:
            UsageError: the folder holds other things, or shards of another repository.
            OutputError: another process fetches into it, or it cannot be written.
        """
        if self._lock is not None:
            return
        marker = self.directory / MARKER
        with disk_faults(marker):
            if self.directory.exists() and not marker.exists() and any(self.directory.iterdir()):
                raise UsageError(
                    f"{self.directory} holds other files; shards are fetched into a folder of their own, and removed",
                    "give --download-dir with a new or empty folder",
                )
            lock = self._locked(marker)
        try:
            self._claim(lock, marker)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _locked(self, marker: Path) -> int:
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise OutputError(
                    f"another process fetches shards into {self.directory}",
                    "wait for it to end, or give --download-dir with another folder",
                ) from None
            # The holder of the lock may have removed marker and folder between open and flock.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), marker.stat()):
                    return lock
            os.close(lock)

    def _claim(self, lock: int, marker: Path) -> None:
        repo = self._repository.address.repo
        held = _read_marker(marker)
        if held and held.get("repo") != repo:
            raise UsageError(
                f"{self.directory} holds shards of {held.get('repo')}, not of {repo}",
                "give --download-dir with another folder",
            )
        with disk_faults(marker):
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"repo": repo, "keep": self.keep}).encode(), 0)
        current = {self.part(file).name for file in self._repository.files.values()}
        for path in self.directory.rglob("*.part"):
            if _PART.search(path.name) and path.name not in current:
                path.unlink(missing_ok=True)

    def fetch(self, file: HubFile) -> Path:
        """Have a shard on disk, whole and checked.

        Raises:
            InputError: it cannot be had, or its hash is not the Hub's, three times.
            OutputError: the disk is full or fails.
        """
        self.open()
        path, part = self.path(file), self.part(file)
        if self._is_right(path, file):
            self.fetched(file.nbytes)
            return path
        for _ in range(WHOLE_TRIES):
            found = self._continue(part, file)
            if found == file.hash:
                with disk_faults(path):
                    part.replace(path)
                return path
            part.unlink()
            self.fetched(-file.nbytes)
            self._repository.transport.note(f"{file.path}: wrong bytes came (hash {found}); fetched again")
        raise wrong_bytes(self._repository.address.repo, file, found)

    def remove(self, file: HubFile) -> None:
        """Remove a shard, or a part of it, unless shards are kept."""
        if not self.keep and self._lock is not None:
            for path in (self.path(file), self.part(file)):
                with disk_faults(path):
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what a run that was killed has left behind, unless shards are kept; nobody else's."""
        with suppress(OutputError, UsageError):
            if (self.directory / MARKER).exists():
                self.open()
                for file in self._repository.files.values():
                    self.remove(file)

    def close(self) -> None:
        """Give up the lock; a folder with nothing in it is removed."""
        if self._lock is None:
            return
        if all(path.name == MARKER or path.is_dir() for path in self.directory.rglob("*")):
            (self.directory / MARKER).unlink(missing_ok=True)
            for path in sorted((p for p in self.directory.rglob("*")), reverse=True):
                path.rmdir()
            with suppress(OSError):
                self.directory.rmdir()
        os.close(self._lock)
        self._lock = None

    def _is_right(self, path: Path, file: HubFile) -> bool:
        try:
            if path.stat().st_size != file.nbytes:
                return False
        except FileNotFoundError:
            return False
        digest = file.digest()
        _feed(path, digest, lambda n: None)
        return bool(digest.hexdigest() == file.hash)

    def _continue(self, part: Path, file: HubFile) -> str:
        """Fetch what ``part`` lacks; the hash of all of it."""
        digest = file.digest()
        with disk_faults(part):
            part.parent.mkdir(parents=True, exist_ok=True)
            have = part.stat().st_size if part.exists() else 0
            if have > file.nbytes:
                part.unlink()
                have = 0
            if have:
                _feed(part, digest, self.fetched)
            with part.open("ab", buffering=0) as out:

                def sink(data: bytes | bytearray) -> None:
                    _write(out, data)
                    digest.update(data)
                    self.fetched(len(data))

                self._repository.transport.copy(file.path, have, file.nbytes, file.nbytes, sink)
                os.fsync(out.fileno())
        return str(digest.hexdigest())


def header_sha256(path: Path) -> str:
    """SHA-256 of a shard's JSON header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(length)).hexdigest()


def _write(out: FileIO, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]


def _feed(path: Path, digest: object, advance: Advance) -> None:
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])  # type: ignore[attr-defined]
            advance(count)


def _read_marker(marker: Path) -> dict[str, object]:
    try:
        held = json.loads(marker.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}
