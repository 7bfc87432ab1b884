"""What the cluster's tests share: verbs as processes, models, free pairs of ports, leaked processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass
class Verb:
    """A running verb and the file that its output goes to."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal and wait for the end; the exit status."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def running(arguments: list[str], output: Path) -> Iterator[Verb]:
    """``kimi-gguf ARGUMENTS`` as a process; it is stopped, and must stop, at the end."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "kimi_gguf", *arguments],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
    verb = Verb(process, output)
    try:
        yield verb
        verb.stop()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def until(what: str, holds: Callable[[], bool], seconds: float = 60) -> None:
    """Return once ``holds()``; slow machines get ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each with a free one after it."""
    found: list[int] = []
    sockets = []
    while len(found) < count:
        first, second = socket.socket(), socket.socket()
        sockets += [first, second]
        first.bind(("127.0.0.1", 0))
        port = int(first.getsockname()[1])
        with suppress(OSError, OverflowError):
            second.bind(("127.0.0.1", port + 1))
            found.append(port)
    for each in sockets:
        each.close()
    return found


def children(pid: int) -> list[int]:
    """Processes that ``pid`` started and that live."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(words[1]) == pid and words[0] != "Z":
                    result.append(int(entry.name))
    return result


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    """kill -9."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
