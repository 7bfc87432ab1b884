"""``kimi-gguf cluster worker``: the patched ``ggml-rpc-server`` on this machine, kept running.

The RPC protocol has no authentication and no encryption, so a worker listens on loopback unless told otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from kimi_gguf.cache import cache_folder
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.rpc import ask_worker, check_free, parse_endpoint
from kimi_gguf.cluster.runtime import Runtime, find
from kimi_gguf.cluster.side_port import SidePort, WorkerState, has_client
from kimi_gguf.cluster.supervise import GRACE_SECONDS, Backoff, Program, log_file, stop_on_signals
from kimi_gguf.cluster.tensor_cache import parse_layers, seed_cache
from quant.errors import UsageError

DEFAULT_BIND = "127.0.0.1:50052"
_START_SECONDS = 60.0
_POLL_SECONDS = 0.2
_CHECK_SECONDS = 5.0
_MISSED_CHECKS = 3
# The server logs each client.
_CHECKS_PER_QUESTION = 6

_RISK = """\
{host} is not loopback. Whoever can reach port {port} there can run computations on this machine, read and overwrite
its tensors, and use the protocol's past and future memory errors to take it over: it has no authentication and no
encryption. Let a firewall admit the head alone, or stay on loopback and tunnel:
  SSH         on the head: ssh -N -L {port}:127.0.0.1:{port} -L {side}:127.0.0.1:{side} USER@THIS-MACHINE
              and name the worker 127.0.0.1:{port} there
  WireGuard   --bind ADDRESS-OF-THE-TUNNEL:{port}"""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """A worker's life: its address, how often the server was started, seconds."""

    endpoint: str
    starts: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"endpoint": self.endpoint, "starts": self.starts, "seconds": round(self.seconds, 1)}


def cluster_worker(
    *,
    bind: str = DEFAULT_BIND,
    seed: str | os.PathLike[str] | None = None,
    seed_layers: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    insecure_bind: bool = False,
    threads: int | None = None,
    devices: Sequence[str] = (),
    log: str | os.PathLike[str] | None = None,
    note: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> WorkerResult:
    """Run a worker until SIGINT or SIGTERM; main thread only.

    Args:
        bind: ``host:port``; its side port is the next one.
        seed: a GGUF whose large tensors are put into the cache first.
        seed_layers: ``A-B``, only these layers of it.
        cache: where tensors are kept on disk; without it and ``seed`` none are.
        insecure_bind: allow an address that means every interface.
        threads: of the CPU device.
        devices: names of the devices to offer; all GPUs, or else the CPU, by default.
        log: file for the server's output.
        note, warn: told what happens.
        step: progress of seeding, bytes done and in total.

    Raises:
        UsageError: a bind address that is refused, or in use; no runtime.
        RuntimeFault: the server does not start; the message shows its last words.
    """
    host, port = parse_endpoint(bind)
    _check_bind(host, port, insecure_bind, warn)
    if seed_layers is not None and seed is None:
        raise UsageError("--seed-layers chooses layers of --seed, which is missing", "name a GGUF with --seed")
    layers = None if seed_layers is None else parse_layers(seed_layers)
    runtime = find()
    path = log_file(log, f"worker-{port}.log")
    for number in (port, port + 1):
        check_free(host, number, "choose another port with --bind (the side port is the next one), or end what uses it")
    folder = _cache_folder(cache, seed)
    started = time.monotonic()
    with stop_on_signals() as stop:
        if seed is not None and folder is not None:
            note(f"filling the tensor cache {folder} from {seed}")
            done = seed_cache(Path(seed), folder / "rpc", layers=layers, step=step, stop=stop)
            note(f"the cache holds {done.nbytes:,} bytes of {done.tensors} tensors, {done.written:,} of them new")
        facts = runtime.facts
        state = WorkerState(facts.digest, facts.rpc_protocol, cache=folder is not None)
        command = _command(runtime, host, port, threads, devices, folder)
        environment = runtime.environment()
        if folder is not None:
            environment["LLAMA_CACHE"] = str(folder)
        side = SidePort(host, port + 1, port, state)
        try:
            starts = _Supervisor(bind, command, environment, path, side, note).run(state, stop)
        finally:
            side.close()
    return WorkerResult(bind, starts, time.monotonic() - started)


class _Supervisor:
    """Keeps the server running until told to stop."""

    def __init__(
        self,
        endpoint: str,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        side: SidePort,
        note: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._command, self._environment, self._log = command, environment, log
        self._side, self._note = side, note

    def run(self, state: WorkerState, stop: Event) -> int:
        """Start the server as often as needed; how often that was."""
        backoff = Backoff()
        ready = False
        hung: str | None = None
        while not stop.is_set():
            state = replace(state, instance=state.instance + 1)
            self._side.update(state)
            program = Program(self._command, self._environment, self._log)
            try:
                memory = self._wait(program, state, stop)
                if memory is not None:
                    state = replace(state, state="running", memory=memory)
                    self._side.update(state)
                    self._note(self._ready(state))
                    ready = True
                hung = watch(program, self._endpoint, state, stop)
                if stop.is_set():
                    break
                reason = hung or f"the server {program.ending}"
                if not ready:
                    raise RuntimeFault(
                        f"{self._endpoint}: {reason}{program.last_words()}", f"its output is in {self._log}"
                    )
                wait = backoff.after(time.monotonic() - program.started)
                state = replace(state, state="restarting", reason=reason)
                self._side.update(state)
                self._note(f"{reason}; starting it again in {wait:g} s")
            finally:
                # What hangs hears no polite signal.
                program.stop(0.5 if hung else GRACE_SECONDS)
            stop.wait(wait)
        self._side.update(replace(state, state="stopped"))
        return state.instance

    def _wait(self, program: Program, state: WorkerState, stop: Event) -> tuple[tuple[int, int], ...] | None:
        """Memory of the devices once the server answers; None when it ended, was told to, or had to be ended."""
        deadline = time.monotonic() + _START_SECONDS
        _, port = parse_endpoint(self._endpoint)
        while program.running and not stop.wait(_POLL_SECONDS):
            try:
                return ask_worker(self._endpoint, state.protocol).memory
            except RuntimeFault as fault:
                # A head that waited for the restart was faster.
                if state.memory and has_client(port):
                    return state.memory
                if time.monotonic() > deadline:
                    self._note(f"the server does not answer within {_START_SECONDS:g} s: {fault.message}")
                    program.stop()
        return None

    def _ready(self, state: WorkerState) -> str:
        memory = ", ".join(f"{total / 1e9:.1f} GB" for _, total in state.memory)
        host, port = parse_endpoint(self._endpoint)
        again = "" if state.instance == 1 else f", start {state.instance}"
        where = f"state at http://{host}:{port + 1}/; log {self._log}"
        return f"worker at {self._endpoint}{again}, memory {memory}; {where}"


def watch(program: Program, endpoint: str, state: WorkerState, stop: Event) -> str | None:
    """Return when the server at ``endpoint`` ended or is to; why, when it runs but is of no use.

    It serves one client at a time, so it is asked only while it has none: what hangs with a head is freed by that
    head's own limit.
    """
    _, port = parse_endpoint(endpoint)
    missed, checks, why = 0, 0, ""
    checked = time.monotonic()
    while program.running and not stop.wait(_POLL_SECONDS):
        if time.monotonic() - checked < _CHECK_SECONDS:
            continue
        checks += 1
        asks = (missed or checks % _CHECKS_PER_QUESTION == 0) and has_client(port) is False
        if program.halted:
            missed, why = missed + 1, "is stopped by a signal"
        elif asks and not _answers(endpoint, state):
            missed, why = missed + 1, "answers nobody"
        else:
            missed = 0
        if missed >= _MISSED_CHECKS:
            return f"the server {why}"
        checked = time.monotonic()
    return None


def _answers(endpoint: str, state: WorkerState) -> bool:
    try:
        ask_worker(endpoint, state.protocol)
    except RuntimeFault:
        # A head came between.
        return has_client(parse_endpoint(endpoint)[1]) is not False
    return True


def _check_bind(host: str, port: int, insecure: bool, warn: Callable[[str], None]) -> None:
    if port > 65534:
        raise UsageError(f"port {port} leaves none for the side port", "choose a lower port")
    addresses = _addresses(host)
    if any(address.is_unspecified for address in addresses) and not insecure:
        raise UsageError(
            f"{host} means every interface of this machine, and the RPC protocol has no authentication",
            "name one address, or loopback and a tunnel; --insecure-bind if every network there is trusted",
        )
    if not all(address.is_loopback for address in addresses):
        warn(_RISK.format(host=host, port=port, side=port + 1))


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{host} is no address of this machine: {error}", "write --bind ADDRESS:PORT") from None
    return [ipaddress.ip_address(str(entry[4][0])) for entry in found]


def _cache_folder(cache: str | os.PathLike[str] | None, seed: str | os.PathLike[str] | None) -> Path | None:
    if cache is not None:
        return Path(cache).absolute()
    return cache_folder() / "worker" if seed is not None else None


def _command(
    runtime: Runtime, host: str, port: int, threads: int | None, devices: Sequence[str], cache: Path | None
) -> list[str]:
    command = [str(runtime.program("ggml-rpc-server")), "-H", host, "-p", str(port)]
    if threads is not None:
        command += ["-t", str(threads)]
    if devices:
        command += ["-d", ",".join(devices)]
    if cache is not None:
        command += ["-c"]
    return command
