"""One upload into a branch of a repository at a time, on this machine; across machines the Hub's commits decide."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convert.disk import disk_faults
from kimi_gguf.cache import cache_folder
from quant.errors import OutputError


@contextmanager
def upload_lock(repo: str, branch: str, folder: Path | None = None) -> Iterator[None]:
    """Hold the lock of a branch.

    Args:
        folder: of the lock files; the cache folder's by default.

    Raises:
        OutputError: another process uploads there.
    """
    folder = folder or cache_folder() / "uploads"
    path = folder / (re.sub(r"[^\w.-]", "--", f"{repo}@{branch}") + ".lock")
    with disk_faults(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise OutputError(
                f"another process{f' ({pid})' if pid else ''} uploads to {repo}, branch {branch}",
                "wait for it to end; the same command then uploads only what is missing",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
