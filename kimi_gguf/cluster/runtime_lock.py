"""One build at a time: a file lock that the operating system releases when its holder dies."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Stages(Protocol):
    """Told what is going on."""

    def stage(self, name: str) -> None: ...


@contextmanager
def build_lock(home: Path, progress: Stages) -> Iterator[None]:
    """Hold the lock of the builds in ``home``, waiting for another build to end."""
    with (home / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.stage("waiting for another build")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
