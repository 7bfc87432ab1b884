"""The append-only record of a conversion's progress, beside its output.

Each line is the CRC-32 of a JSON text in hex, a space, and that text. The first line is the header: which plan this
is, and the state of the source files it began with. Then come, in any order: runs (process ids), batches of finished
units with the CRC-32C of the bytes written, units to do again, and finished files with their hashes. A batch is
appended after the data it speaks of has been synced, so what a journal says is on disk. A last line that was
cut by a crash fails its check and is dropped; the units it named are done again.

The journal is also the lock: a process holds ``flock`` on it as long as it works on the output.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from convert.disk import disk_faults
from quant.errors import InputError, OutputError

VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """What a journal belongs to.

    Attributes:
        digest: of the plan.
        settings: the choices behind the plan, for messages: quant, encoder, split size ...
        files: names of the output files, in order.
        units: number of work units.
        stamps: state of each shard that is read, by name (``Source.stamp``).
        revision: commit of the checkpoint, empty when it has none.
    """

    digest: str
    settings: Mapping[str, str]
    files: Sequence[str]
    units: int
    stamps: Mapping[str, str]
    revision: str = ""
    journal: int = VERSION


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that is complete and checked: its SHA-256, and that of each of its tensors in file order."""

    sha256: str
    tensors: tuple[str, ...]


class Journal:
    """An open, locked journal. Its methods may be called from several threads.

    Attributes:
        header: as read, or as given for a new journal.
        checksums: CRC-32C of each unit by number, -1 for units that are not done.
        files: finished files by index.
        changed: shards whose files are no longer those that earlier runs read; what came from them must be redone.
        discarded: header of a conversion of another plan that this journal replaces.
    """

    def __init__(self, path: Path, descriptor: int, header: JournalHeader) -> None:
        self.path = path
        self.header = header
        self.changed: tuple[str, ...] = ()
        self.discarded: JournalHeader | None = None
        self.checksums = array("q", [-1]) * header.units
        self.files: dict[int, FileRecord] = {}
        self._descriptor = descriptor
        self._pending: list[tuple[int, int]] = []
        self._lock = Lock()
        self._write_lock = Lock()

    def record(self, unit: int, checksum: int) -> None:
        """Note a unit whose bytes have been written, to be journalled by the next ``flush``."""
        with self._lock:
            self._pending.append((unit, checksum))
            self.checksums[unit] = checksum

    def flush(self, sync: Callable[[], None]) -> None:
        """Journal what has been recorded; ``sync`` makes the written data durable first."""
        with self._write_lock:
            with self._lock:
                batch, self._pending = self._pending, []
            if batch:
                sync()
                self._append({"units": batch})

    def record_file(self, index: int, record: FileRecord) -> None:
        """Note a complete and checked file, at once."""
        with self._write_lock:
            self.files[index] = record
            self._append({"file": index, "sha256": record.sha256, "tensors": list(record.tensors)})

    def forget(self, units: Iterable[int], files: Iterable[int] = ()) -> None:
        """Note units, and files, that must be done again."""
        gone, lost = list(units), list(files)
        with self._write_lock:
            for unit in gone:
                self.checksums[unit] = -1
            for index in lost:
                self.files.pop(index, None)
            if gone or lost:
                self._append({"redo": gone, "lost": lost})

    def close(self) -> None:
        """Give up the lock; the journal stays for a later run."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the journal, then give up the lock."""
        self.path.unlink()
        self.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        with disk_faults(self.path):
            _append(self._descriptor, record)

    def _replay(self, record: Mapping[str, Any]) -> None:
        for unit, checksum in record.get("units", ()):
            self.checksums[unit] = checksum
        if "file" in record:
            self.files[record["file"]] = FileRecord(record["sha256"], tuple(record["tensors"]))
        for unit in record.get("redo", ()):
            self.checksums[unit] = -1
        for index in record.get("lost", ()):
            self.files.pop(index, None)


def open_journal(path: Path, header: JournalHeader, *, overwrite: bool) -> Journal:
    """Lock the journal at ``path`` and continue it, or begin a new one.

    Args:
        header: of the conversion that is about to run.
        overwrite: a journal of another plan is discarded and changed shards are accepted, else both are refused.

    Raises:
        OutputError: another process holds the lock, or the journal belongs to another plan.
        InputError: the journal belongs to this plan, but the checkpoint's files have changed.
    """
    descriptor = _lock(path)
    try:
        old, records, valid = _read(descriptor)
        if old is not None and not overwrite:
            _check_same(path, old, header)
        journal = Journal(path, descriptor, header)
        first: dict[str, Any] = {"pid": os.getpid()}
        if old is None or old.digest != header.digest:
            journal.discarded, records, valid = old, [], 0
            first = asdict(header) | first
        elif old.stamps != header.stamps or old.revision != header.revision:
            journal.changed = tuple(_changed(old, header))
            first |= {"stamps": header.stamps, "revision": header.revision}
        for record in records:
            journal._replay(record)
        with disk_faults(path):
            os.ftruncate(descriptor, valid)
            os.lseek(descriptor, 0, os.SEEK_END)
            _append(descriptor, first)
        return journal
    except BaseException:
        os.close(descriptor)
        raise


def _lock(path: Path) -> int:
    while True:
        with disk_faults(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OutputError(f"{path} is not a regular file", "remove it, or choose another --outfile or --outdir")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = next((r["pid"] for r in reversed(_lines(descriptor)[0]) if "pid" in r), None)
            os.close(descriptor)
            raise OutputError(
                f"another process{f' ({pid})' if pid else ''} is writing this output: {path.parent / path.stem}",
                "wait for it to end, or choose another --outfile or --outdir",
            ) from None
        # The holder of the lock may have finished and removed the journal between open and flock.
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _append(descriptor: int, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, separators=(",", ":")).encode()
    line = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while line:
        line = line[os.write(descriptor, line) :]
    os.fdatasync(descriptor)


def _lines(descriptor: int) -> tuple[list[dict[str, Any]], int]:
    """All records up to the first that fails its check, and the bytes they take."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    data = b""
    while part := os.read(descriptor, 1 << 20):
        data += part
    records, valid = [], 0
    for line in data.splitlines(keepends=True):
        check, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or b"%08x" % zlib.crc32(text) != check:
            break
        records.append(json.loads(text))
        valid += len(line)
    return records, valid


def _read(descriptor: int) -> tuple[JournalHeader | None, list[dict[str, Any]], int]:
    records, valid = _lines(descriptor)
    if not records or records[0].get("journal") != VERSION:
        return None, [], 0
    fields = {key: value for key, value in records[0].items() if key != "pid"}
    for record in records[1:]:
        fields |= {key: record[key] for key in ("stamps", "revision") if key in record}
    return JournalHeader(**fields), records[1:], valid


def _changed(old: JournalHeader, new: JournalHeader) -> list[str]:
    return [name for name in new.stamps if old.stamps.get(name) != new.stamps[name]]


def _check_same(path: Path, old: JournalHeader, new: JournalHeader) -> None:
    way_out = "finish it by its own command, or give --overwrite to discard it and start anew"
    if old.revision and new.revision and old.revision != new.revision:
        raise InputError(
            f"the checkpoint was at revision {old.revision} when the unfinished conversion {path.parent / path.stem} "
            f"began, and is at {new.revision} now",
            f"name that one to continue (owner/name@{old.revision}), or give --overwrite to start from the new one",
        )
    if old.digest != new.digest:
        changed = [
            f"{key} was {old.settings.get(key, 'unset')}, is now {new.settings.get(key, 'unset')}"
            for key in dict.fromkeys([*old.settings, *new.settings])
            if old.settings.get(key) != new.settings.get(key)
        ]
        what = "; ".join(changed) or "the checkpoint or the tool is another one"
        raise OutputError(
            f"{path.parent / path.stem} holds an unfinished conversion with another plan: {what}", way_out
        )
    if old.stamps != new.stamps:
        shards = _changed(old, new)
        raise InputError(
            f"{len(shards)} shards have changed since the unfinished conversion {path.parent / path.stem} began; "
            f"the first is {shards[0]}",
            "put the old files back, or give --overwrite to do again what was made from them",
        )
