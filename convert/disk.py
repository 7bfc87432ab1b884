"""Faults and free space of the disk that is written to, as messages a user can act on."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quant.errors import OutputError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn an OSError met while writing ``path`` into an OutputError."""
    try:
        yield
    except OSError as error:
        raise _fault(path, error) from error


def _fault(path: Path, error: OSError) -> OutputError:
    if error.errno in _FULL:
        return OutputError(
            f"the disk is full: {path} cannot grow ({free_bytes(path.parent):,} bytes are free)",
            "free some space and run the same command again: it continues where it stopped",
        )
    if error.errno == errno.EFBIG:
        return OutputError(
            f"{path} is larger than its filesystem, or a limit of this shell, allows a file to be",
            "give a smaller --split-max-size, or write to another filesystem",
        )
    if error.errno == errno.EMFILE:
        return OutputError(
            f"too many output files are open at once, {path} is one more",
            "give a larger --split-max-size, or raise the limit with ulimit -n; the same command continues",
        )
    return OutputError(
        f"cannot write {path}: {error.strerror or error}",
        "when the cause is gone, run the same command again: it continues where it stopped",
    )


def free_bytes(directory: Path) -> int:
    """Bytes that this user can still write on the filesystem of ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def allocated_bytes(path: Path) -> int:
    """Bytes that a file takes on disk, holes not counted; 0 when there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
