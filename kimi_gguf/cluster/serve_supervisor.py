"""Keeps a llama-server running: starts it, waits for it, watches it and its workers, and starts it again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from threading import Event

from convert.structure import check_structure
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.front import LOCAL, Front
from kimi_gguf.cluster.rpc import ask_worker, lost_worker
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.cluster.serve_flags import ServeOptions, server_arguments
from kimi_gguf.cluster.side_port import ask_side_port
from kimi_gguf.cluster.small_http import fetch
from kimi_gguf.cluster.supervise import Backoff, Program
from quant.errors import InputError
from quant.gguf_split import GgufSet

_POLL_SECONDS = 0.2
_WATCH_SECONDS = 5.0
_HEALTH_SECONDS = 10.0
_MISSED_CHECKS = 3
_FAILED_STARTS = 5
SILENT_SECONDS = 60.0


class Heard:
    """When workers were heard last: a machine or network that is gone breaks no connection for a long time."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def silent(self, known: Iterable[str], seen: Container[str], now: float) -> str | None:
        """One of the ``known`` that was not among the ``seen`` for SILENT_SECONDS, at the time ``now``."""
        for endpoint in known:
            if endpoint in seen:
                self._last[endpoint] = now
            elif now - self._last.setdefault(endpoint, now) >= SILENT_SECONDS:
                return endpoint
        return None


class Supervisor:
    """A head and its life.

    Args:
        options, files: what is served.
        log: file that the head's output is appended to.
        load_timeout, worker_timeout, give_up: limits in seconds, as of ``serve``.
        note, status: told what happens, and how things are.
        stop: ends the service when set.
        front: told where the head listens, or why there is none.
        address: of the service, for messages.
    """

    def __init__(
        self,
        options: ServeOptions,
        files: GgufSet,
        runtime: Runtime,
        log: Path,
        load_timeout: float,
        worker_timeout: float,
        give_up: float,
        note: Callable[[str], None],
        status: Callable[[str], None],
        stop: Event,
        front: Front,
        address: str,
    ) -> None:
        structure = check_structure(files)
        if structure is None or structure.config is None:
            raise InputError(f"{options.model} is no model that can be served", "name a GGUF of kimi-k3 or kimi-k31")
        self._options = options
        self._command = [str(runtime.program("llama-server")), *server_arguments(options, structure.config)]
        self._environment = runtime.environment()
        # A worker that hangs must not hang the head.
        self._environment["GGML_RPC_TIMEOUT"] = str(max(1, int(worker_timeout)))
        self._protocol = runtime.facts.rpc_protocol
        self._log = log
        self._load_timeout, self._give_up = load_timeout, give_up
        self._note, self._status, self._stop = note, status, stop
        self._front, self._address = front, address
        self._instances: dict[str, int] = {}
        self._heard = Heard()

    def run(self) -> int:
        """Start the head as often as needed; how often that was."""
        backoff = Backoff()
        starts = failed = 0
        ever = False
        while not self._stop.is_set():
            starts += 1
            self._instances, self._heard = self._seen(), Heard()
            program = Program(self._command, self._environment, self._log)
            ready = False
            try:
                reason = self._load(program)
                if reason is None and not self._stop.is_set():
                    ever = ready = True
                    self._note(self._ready(starts, time.monotonic() - program.started))
                    reason = self._watch(program, starts)
            finally:
                if self._stop.is_set():
                    self._front.shut("the service was stopped")
                said = program.last_words() if not program.running else ""
                program.stop()
            if reason is None:
                break
            failed = 0 if ready else failed + 1
            if (not ever and not lost_worker(said)) or failed >= _FAILED_STARTS:
                raise RuntimeFault(f"{reason}{said}", f"its output is in {self._log}")
            self._front.shut(f"the service is restarting: {reason}")
            wait = backoff.after(time.monotonic() - program.started if ready else 0)
            self._note(f"{reason}; starting again in {wait:g} s")
            self._stop.wait(wait)
            self._await_workers()
        return starts

    def _load(self, program: Program) -> str | None:
        """Wait for the head; None when it is ready or the service is to stop, else why it is not."""
        deadline = program.started + self._load_timeout
        last = 0.0
        while not self._stop.wait(_POLL_SECONDS):
            now = time.monotonic()
            if not program.running:
                return self._ending(program)
            if now > deadline:
                return f"the model was not loaded within {self._load_timeout:.0f} s"
            if now - last >= min(_WATCH_SECONDS, 0.5 + (now - program.started) / 10):
                last = now
                with suppress(OSError, ValueError):
                    code, _ = fetch(LOCAL, self._options.port, "/health", timeout=_HEALTH_SECONDS)
                    if code == HTTPStatus.OK:
                        self._front.open(self._options.port)
                        return None
                self._status(f"loading, {now - program.started:.0f} s")
        return None

    def _watch(self, program: Program, starts: int) -> str | None:
        """Watch a ready head and its workers; why it is no more, or None when the service is to stop."""
        missed = 0
        begin = checked = time.monotonic()
        while not self._stop.wait(_POLL_SECONDS):
            if not program.running:
                return self._ending(program)
            now = time.monotonic()
            if now - checked < _WATCH_SECONDS:
                continue
            busy = self._busy()
            missed = 0 if busy is not None else missed + 1
            if missed >= _MISSED_CHECKS:
                return f"the server did not answer {missed} health checks of {_HEALTH_SECONDS:g} s"
            seen = self._seen()
            if lost := self._heard.silent(self._instances, seen, time.monotonic()):
                return f"worker {lost} has not answered at its side port for {SILENT_SECONDS:g} s"
            for endpoint, instance in seen.items():
                if self._instances.setdefault(endpoint, instance) != instance:
                    return f"worker {endpoint} was restarted, the weights it held are gone"
            again = f", {starts - 1} restarts" if starts > 1 else ""
            self._status(f"serving {now - begin:.0f} s, {busy or 0} of {self._options.parallel} slots busy{again}")
            checked = time.monotonic()
        return None

    def _busy(self) -> int | None:
        """Slots that work on a request; None when the server does not answer."""
        try:
            code, body = fetch(LOCAL, self._options.port, "/health", timeout=_HEALTH_SECONDS)
            if code != HTTPStatus.OK:
                return None
            # A decoding server may be slow with this one, which is no sign of trouble.
            with suppress(OSError, ValueError, AttributeError):
                _, body = fetch(LOCAL, self._options.port, "/slots", timeout=1.0, limit=1 << 22)
                return sum(bool(slot.get("is_processing")) for slot in json.loads(body))
            return 0
        except (OSError, ValueError):
            return None

    def _seen(self) -> dict[str, int]:
        """How often each worker's server was started, of those whose side port answers."""
        found = {}
        for endpoint in self._options.rpc:
            with suppress(OSError, ValueError):
                found[endpoint] = ask_side_port(endpoint, timeout=1.0).instance
        return found

    def _await_workers(self) -> None:
        """Return when every worker answers, or the service is to stop.

        Raises:
            RuntimeFault: one did not return in time.
        """
        deadline = time.monotonic() + self._give_up
        told = ""
        for endpoint in self._options.rpc:
            while not self._stop.is_set():
                try:
                    ask_worker(endpoint, self._protocol)
                    break
                except RuntimeFault as fault:
                    if time.monotonic() > deadline:
                        raise RuntimeFault(
                            f"gave up after {self._give_up:.0f} s: {fault.message}", fault.hint
                        ) from None
                    if told != endpoint:
                        told = endpoint
                        self._note(f"waiting for worker {endpoint}: {fault.message}")
                    self._status(f"waiting for worker {endpoint}")
                    self._stop.wait(1.0)

    def _ready(self, starts: int, seconds: float) -> str:
        workers = f" over {len(self._options.rpc)} workers" if self._options.rpc else ""
        again = f" (start {starts})" if starts > 1 else ""
        return f"ready after {seconds:.1f} s{workers}{again}: {self._address}; log {self._log}"

    def _ending(self, program: Program) -> str:
        lost = lost_worker(program.said())
        return f"worker {lost} was lost" if lost else f"the server {program.ending}"
