"""Child processes that are watched: they die with this process, are ended for certain, and leave a log.

A supervisor starts its programs from its main thread: on Linux a child is killed when the thread that started it ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from kimi_gguf.cache import cache_folder
from quant.errors import UsageError

GRACE_SECONDS = 10.0
MOST_THREADS = 512
"""ggml's own limit; beyond it its programs crash."""

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 1 << 15
_TAIL_LINES = 12

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Program:
    """A process in a session of its own, its output appended to a log.

    Args:
        command: program and arguments.
        environment: the whole environment.
        log: file that output is appended to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        parent = os.getpid()

        def prepare() -> None:
            # A core of a process that holds a model takes minutes to write and fills the disk.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if _LIBC is not None:
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)

        self._log = log
        with log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        """Process id, which is also the group's."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    @property
    def halted(self) -> bool:
        """Whether the process was stopped by a signal or a debugger; False where this cannot be told."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    @property
    def ending(self) -> str:
        """How the process ended, as words that follow its name."""
        status = self._process.poll()
        if status is None:
            return "runs"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """End the process and whatever it started: politely, and after ``grace`` seconds for certain."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def said(self) -> str:
        """The end of what it printed since it was started."""
        with self._log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._log_begin, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def last_words(self) -> str:
        """The last lines of ``said``, each marked, for a message."""
        lines = [line for line in self.said().splitlines() if line.strip()]
        return "".join(f"\n  | {line}" for line in lines[-_TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Backoff:
    """Seconds to wait before the next start: twice as long each time, short again after a long run.

    Args:
        first, most: bounds in seconds.
        calm: a run of so many seconds counts as healthy.
    """

    def __init__(self, first: float = 0.5, most: float = 30.0, calm: float = 20.0) -> None:
        self._first, self._most, self._calm = first, most, calm
        self._next = first

    def after(self, run: float) -> float:
        """Seconds to wait after a run of ``run`` seconds."""
        if run >= self._calm:
            self._next = self._first
        wait = self._next
        self._next = min(self._most, 2 * self._next)
        return wait


def log_file(log: str | os.PathLike[str] | None, name: str) -> Path:
    """The file that a program's output goes to: the one named by ``--log``, else ``name`` in the cache folder.

    Raises:
        UsageError: a folder in its place, or no folder to put it in.
    """
    if log is None:
        path = cache_folder() / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
    path = Path(log)
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file in it with --log")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", "make it first, or name another --log")
    return path


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set instead of what they did before; main thread only."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
