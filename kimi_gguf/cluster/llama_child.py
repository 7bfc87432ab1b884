"""The parent's end of an engine's child process: requests and answers with time limits, and what it said last."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.llama_protocol import Array, Header, frame, read_frame

_LOG_TAIL_BYTES = 16384
_LOG_TAIL_LINES = 12
_END_SECONDS = 5.0
_ROOT = Path(__file__).parents[2]


class Child:
    """A process running ``kimi_gguf.cluster.llama_worker``.

    Args:
        environment: of the process; ``PYTHONPATH`` and the library's folder are in it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Without a name, so that nothing is left of it even when this process is killed.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        env = dict(environment)
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(_ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kimi_gguf.cluster.llama_worker"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._write_fd = self._process.stdin.fileno()
        self._read_fd = self._process.stdout.fileno()
        os.set_blocking(self._write_fd, False)
        os.set_blocking(self._read_fd, False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request(
        self, header: Header, arrays: Sequence[Array] = (), *, timeout: float, what: str
    ) -> tuple[Header, list[Array]]:
        """Send a request and wait for its answer.

        Args:
            timeout: seconds without any sign of life (an answer, or progress) after which the process is ended.
            what: the work, as an error message calls it.

        Raises:
            RuntimeFault: the process refused, died or stayed silent.
        """
        deadline = _Deadline(timeout)
        try:
            for piece in frame(header, arrays):
                self._write(memoryview(piece), deadline)
            answer, values = self._answer(timeout)
            while "progress" in answer:
                answer, values = self._answer(timeout)
        except TimeoutError:
            self.close()
            raise RuntimeFault(f"{what}: no answer within {timeout:g} s{self._said()}") from None
        except (EOFError, BrokenPipeError):
            raise RuntimeFault(f"{what}: the engine's process {self._ending()}{self._said()}") from None
        if "error" in answer:
            raise RuntimeFault(f"{what}: {answer['error']}{self._said()}")
        return answer, values

    def close(self) -> None:
        """End the process; keeps the log's end for messages."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._last_words = self._said()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def said(self) -> str:
        """All that the process printed so far; not after ``close``."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def _answer(self, timeout: float) -> tuple[Header, list[Array]]:
        deadline = _Deadline(timeout)
        return read_frame(lambda buffer: self._fill(buffer, deadline))

    def _write(self, data: memoryview, deadline: _Deadline) -> None:
        while data:
            _, ready, _ = select.select([], [self._write_fd], [], deadline.left())
            if ready:
                data = data[os.write(self._write_fd, data) :]

    def _fill(self, buffer: memoryview, deadline: _Deadline) -> None:
        while buffer:
            ready, _, _ = select.select([self._read_fd], [], [], deadline.left())
            if not ready:
                continue
            count = os.readv(self._read_fd, [buffer])
            if count == 0:
                raise EOFError
            buffer = buffer[count:]

    def _ending(self) -> str:
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "closed its end and was killed"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _said(self) -> str:
        if self._log.closed:
            return self._last_words
        size = os.fstat(self._log.fileno()).st_size
        # Not read(): the child writes where the offset that both share stands.
        data = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if not line.startswith("info: ")] or lines
        return "".join(f"\n  | {line}" for line in telling[-_LOG_TAIL_LINES:])

    _last_words = ""


class _Deadline:
    """Seconds that are left of a time limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Raises ``TimeoutError`` when none are left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
