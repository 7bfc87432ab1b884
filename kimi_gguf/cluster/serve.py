"""``kimi-gguf serve``: the patched llama-server for one model, here or over RPC workers, kept running.

A head that loses a worker cannot go on: its weights and states there are gone, and llama.cpp ends the process. The
supervisor says which worker it was, waits until all answer again, and starts the head anew. Every step has a limit. The
head listens on a local port of its own; clients talk to ``Front``, which answers for it while it is lost or loads.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any

from convert.model_card import own_chat_template
from convert.structure import check_structure
from kimi_gguf.cache import cache_folder
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.front import Front
from kimi_gguf.cluster.llama_engine import check_model
from kimi_gguf.cluster.placement_flags import flags
from kimi_gguf.cluster.placement_plan import cluster_plan
from kimi_gguf.cluster.rpc import ask_worker, lost_worker
from kimi_gguf.cluster.runtime import Runtime, find
from kimi_gguf.cluster.serve_flags import ServeOptions, server_arguments
from kimi_gguf.cluster.side_port import ask_side_port
from kimi_gguf.cluster.small_http import fetch
from kimi_gguf.cluster.supervise import Backoff, Program, stop_on_signals
from quant.errors import InputError, UsageError
from quant.gguf_split import GgufSet, read_gguf_set

DEFAULT_CONTEXT = 32768
DEFAULT_PORT = 8080
GIVE_UP_SECONDS = 600.0
WORKER_SECONDS = 600.0

_LOCAL = "127.0.0.1"
_LOOPBACK = ("127.0.0.1", "localhost")
_POLL_SECONDS = 0.2
_WATCH_SECONDS = 5.0
_HEALTH_SECONDS = 10.0
_MISSED_CHECKS = 3
_FAILED_STARTS = 5
# What loading takes at least, and a rate that any disk and most links exceed.
_LOAD_SECONDS = 120.0
_LOAD_RATE = 25e6


@dataclass(frozen=True, slots=True)
class ServeResult:
    """A service's life: its address, starts of the head, seconds."""

    address: str
    starts: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"address": self.address, "starts": self.starts, "seconds": round(self.seconds, 1)}


def serve(
    model: str | os.PathLike[str],
    *,
    rpc: Sequence[str] = (),
    nodes: str | os.PathLike[str] | None = None,
    context: int | None = None,
    parallel: int = 1,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    alias: str | None = None,
    threads: int | None = None,
    load_timeout: float | None = None,
    worker_timeout: float = WORKER_SECONDS,
    give_up: float = GIVE_UP_SECONDS,
    log: str | os.PathLike[str] | None = None,
    extra: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    status: Callable[[str], None] = lambda text: None,
) -> ServeResult:
    """Serve a model until SIGINT or SIGTERM; main thread only.

    Args:
        model: a GGUF, or any file of a split set.
        rpc: workers, ``host:port``.
        nodes: file that describes the machines; decides which layers go where, see ``cluster plan``.
        context: tokens of one conversation; 32768, or the model's limit where that is less, by default.
        parallel: conversations at once.
        host, port: where to listen.
        alias: name of the model in the API; its file's by default.
        threads: of the CPU backend.
        load_timeout: seconds until the model must have been loaded; grows with the file by default.
        worker_timeout: seconds that one answer of a worker may take.
        give_up: seconds to wait for a lost worker to return.
        log: file for the server's output.
        extra: further arguments of llama-server.
        note: told what happens.
        status: told the state every few seconds, in one line.

    Raises:
        UsageError: an address in use, an unusable option, no runtime.
        InputError: the file is damaged, or no model of ours.
        RuntimeFault: a worker does not answer, or the head does not start or stay; says why.
    """
    runtime = find()
    files = read_gguf_set(Path(model))
    check_model(files.paths[0])
    _check_free(host, port)
    path = Path(log) if log is not None else cache_folder() / "logs" / f"serve-{port}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = _context(files, context)
    placement: Sequence[str] = ()
    if nodes is not None:
        if rpc:
            raise UsageError("--rpc and --nodes both name workers", "give one of them")
        rpc, placement = _placement(files.paths[0], nodes, tokens, parallel)
    for endpoint in rpc:
        ask_worker(endpoint, runtime.facts.rpc_protocol)
    if host not in _LOOPBACK:
        note(f"whoever reaches {host}:{port} can use the service; to ask for a key, add -- --api-key-file FILE")
    nbytes = sum(header.file_size for header in files.headers)
    limit = load_timeout or _LOAD_SECONDS + nbytes / _LOAD_RATE
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kimi-gguf-serve-") as folder, stop_on_signals() as stop:
        options = ServeOptions(
            model=files.paths[0].absolute(),
            alias=alias or files.paths[0].stem,
            context=tokens,
            parallel=parallel,
            host=_LOCAL,
            port=free_port(),
            rpc=tuple(rpc),
            placement=tuple(placement),
            threads=threads,
            template=_template(files, Path(folder)),
            extra=tuple(extra),
        )
        address = f"http://{host}:{port}/v1"
        with Front(host, port) as front:
            supervisor = _Supervisor(
                options, files, runtime, path, limit, worker_timeout, give_up, note, status, stop, front, address
            )
            starts = supervisor.run()
    return ServeResult(address, starts, time.monotonic() - started)


class _Supervisor:
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
            raise InputError(f"{options.model} is no model that can be served")
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

    def run(self) -> int:
        """Start the head as often as needed; how often that was."""
        backoff = Backoff()
        starts = failed = 0
        ever = False
        while not self._stop.is_set():
            starts += 1
            self._instances = self._seen()
            program = Program(self._command, self._environment, self._log)
            ready = False
            try:
                reason = self._load(program)
                if reason is None and not self._stop.is_set():
                    ever = ready = True
                    self._note(self._ready(starts, time.monotonic() - program.started))
                    reason = self._watch(program, starts)
            finally:
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
                    code, _ = fetch(_LOCAL, self._options.port, "/health", timeout=_HEALTH_SECONDS)
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
            for endpoint, instance in self._seen().items():
                if self._instances.setdefault(endpoint, instance) != instance:
                    return f"worker {endpoint} was restarted, the weights it held are gone"
            again = f", {starts - 1} restarts" if starts > 1 else ""
            self._status(f"serving {now - begin:.0f} s, {busy or 0} of {self._options.parallel} slots busy{again}")
            checked = time.monotonic()
        return None

    def _busy(self) -> int | None:
        """Slots that work on a request; None when the server does not answer."""
        try:
            code, body = fetch(_LOCAL, self._options.port, "/health", timeout=_HEALTH_SECONDS)
            if code != HTTPStatus.OK:
                return None
            # A decoding server may be slow with this one, which is no sign of trouble.
            with suppress(OSError, ValueError, AttributeError):
                _, body = fetch(_LOCAL, self._options.port, "/slots", timeout=1.0, limit=1 << 22)
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


def _context(files: GgufSet, context: int | None) -> int:
    arch = files.headers[0].get_str("general.architecture")
    most = files.headers[0].get_int(f"{arch}.context_length") or DEFAULT_CONTEXT
    if context is None:
        return min(DEFAULT_CONTEXT, most)
    if context > most:
        raise UsageError(f"--context {context} is above the model's {most} tokens", f"ask for {most} at most")
    return context


def _placement(
    model: Path, nodes: str | os.PathLike[str], context: int, parallel: int
) -> tuple[tuple[str, ...], list[str]]:
    """Workers in the order in which layers are placed on them, and the flags that place them.

    Raises:
        InputError: the model does not fit the nodes.
    """
    words = flags(cluster_plan(model, nodes=nodes, context=context, parallel=parallel))
    if "--rpc" not in words:
        return (), words
    where = words.index("--rpc")
    return tuple(words[where + 1].split(",")), words[:where] + words[where + 2 :]


def _template(files: GgufSet, folder: Path) -> Path | None:
    """Our chat template in ``folder``, when the model has none."""
    if files.headers[0].get_str("tokenizer.chat_template"):
        return None
    path = folder / "chat_template.jinja"
    path.write_text(own_chat_template(), encoding="utf-8")
    return path


def free_port() -> int:
    """A local port that nobody listens on just now."""
    with socket.create_server((_LOCAL, 0)) as probe:
        return int(probe.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UsageError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}", "choose another --port or --host"
        ) from None
