"""``kimi-gguf serve``: the patched llama-server for one model, here or over RPC workers, kept running.

A head that loses a worker cannot go on: its weights and states there are gone, and llama.cpp ends the process. The
supervisor says which worker it was, waits until all answer again, and starts the head anew. Every step has a limit. The
head listens on a local port of its own; clients talk to ``Front``, which answers for it while it is lost or loads.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.model_card import chat_template_file
from kimi_gguf.cluster.front import LOCAL, Front
from kimi_gguf.cluster.llama_engine import check_model
from kimi_gguf.cluster.placement_flags import flags
from kimi_gguf.cluster.placement_plan import cluster_plan
from kimi_gguf.cluster.rpc import ask_worker, check_free
from kimi_gguf.cluster.runtime import find
from kimi_gguf.cluster.serve_flags import ServeOptions
from kimi_gguf.cluster.serve_supervisor import Supervisor
from kimi_gguf.cluster.supervise import log_file, stop_on_signals
from quant.errors import UsageError
from quant.gguf_split import GgufSet, read_gguf_set

DEFAULT_CONTEXT = 32768
DEFAULT_PORT = 8080
GIVE_UP_SECONDS = 600.0
WORKER_SECONDS = 600.0

_LOOPBACK = ("127.0.0.1", "localhost")
# What loading takes at least, and a rate that any disk and most links exceed.
_LOAD_SECONDS = 120.0
_MOST_SECONDS = 1_000_000

# Of llama-server's, those that would move the head out of its supervisor's sight.
_OWN_FLAGS = ("--host", "--port", "--rpc", "--api-prefix", "--ssl-key-file", "--ssl-cert-file")
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
    limits = {"--load-timeout": load_timeout, "--worker-timeout": worker_timeout, "--give-up": give_up}
    for flag, seconds in limits.items():
        if seconds is not None and not 1 <= seconds <= _MOST_SECONDS:
            raise UsageError(f"{flag} {seconds:g} is no limit in seconds", f"give 1 to {_MOST_SECONDS:,}")
    for word in extra:
        if word.partition("=")[0] in _OWN_FLAGS:
            raise UsageError(
                f"{word} cannot go to llama-server: the head listens where its supervisor expects it",
                "give serve's own --host, --port and --rpc before the --; for TLS or a prefix put a proxy in front",
            )
    runtime = find()
    files = read_gguf_set(Path(model))
    check_model(files.paths[0])
    check_free(host, port, "choose another --port or --host")
    path = log_file(log, f"serve-{port}.log")
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
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        has_template = bool(files.headers[0].get_str("tokenizer.chat_template"))
        options = ServeOptions(
            model=files.paths[0].absolute(),
            alias=alias or files.paths[0].stem,
            context=tokens,
            parallel=parallel,
            host=LOCAL,
            port=free_port(),
            rpc=tuple(rpc),
            placement=tuple(placement),
            threads=threads,
            template=None if has_template else stack.enter_context(chat_template_file()),
            extra=tuple(extra),
        )
        address = f"http://{host}:{port}/v1"
        with Front(host, port) as front:
            supervisor = Supervisor(
                options, files, runtime, path, limit, worker_timeout, give_up, note, status, stop, front, address
            )
            starts = supervisor.run()
    return ServeResult(address, starts, time.monotonic() - started)


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


def free_port() -> int:
    """A local port that nobody listens on just now."""
    with socket.create_server((LOCAL, 0)) as probe:
        return int(probe.getsockname()[1])
