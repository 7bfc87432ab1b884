"""A worker's side port: what its supervisor knows, over plain HTTP, also while the worker serves a head.

``GET /`` answers the state as JSON, ``GET /bytes`` a fixed number of bytes to measure a link with. The port is the
worker's own plus one, at the same address; it takes no bodies and changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any

from kimi_gguf.cluster.rpc import parse_endpoint
from kimi_gguf.cluster.small_http import Answer, SmallServer, fetch, json_answer, stream

SERVICE = "kimi-gguf worker"
LINK_BYTES = 64 << 20
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker's supervisor says.

    Attributes:
        build: digest of llama.cpp's source and patches; equal builds speak alike.
        protocol: major, minor, patch of the RPC protocol.
        state: "starting", "running", "restarting" or "stopped".
        instance: counts the starts of the server; another number means that weights sent before are gone.
        memory: (free, total) bytes of each device as the server said at its start.
        available: bytes of main memory that programs could still get.
        client: whether a head is connected; None where this cannot be told.
        cache: whether tensors are kept on disk.
        reason: why the server was restarted last; empty when it was not.
    """

    build: str
    protocol: tuple[int, int, int]
    state: str = "starting"
    instance: int = 0
    memory: tuple[tuple[int, int], ...] = ()
    available: int | None = None
    client: bool | None = None
    cache: bool = False
    reason: str = ""
    service: str = field(default=SERVICE)


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link: seconds to connect, and bytes per second from the worker to here."""

    latency: float
    bandwidth: float


class SidePort:
    """Serves a worker's state; the supervisor calls ``update``.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, rpc_port: int, state: WorkerState) -> None:
        self._lock = Lock()
        self._state = state
        self._rpc_port = rpc_port
        self._block = os.urandom(_PIECE)
        self._server = SmallServer(host, port, self._answer)

    def update(self, state: WorkerState) -> None:
        """Say this from now on."""
        with self._lock:
            self._state = state

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _answer(self, path: str) -> Answer:
        if path == "/":
            with self._lock:
                state = self._state
            return json_answer(asdict(state) | {"available": available_memory(), "client": has_client(self._rpc_port)})
        if path == "/bytes":
            return Answer(HTTPStatus.OK, self._bytes(), LINK_BYTES, "application/octet-stream")
        return json_answer({"error": "not found"}, HTTPStatus.NOT_FOUND)

    def _bytes(self) -> Iterator[bytes]:
        for _ in range(LINK_BYTES // _PIECE):
            yield self._block


def ask_side_port(endpoint: str, *, timeout: float = 3.0, side_port: int | None = None) -> WorkerState:
    """The state of the worker at ``endpoint``, an RPC address.

    Args:
        side_port: where to ask when it is not the RPC port plus one.

    Raises:
        OSError: nobody answers there in time.
        ValueError: somebody else does.
    """
    host, port = parse_endpoint(endpoint)
    status, body = fetch(host, side_port or port + 1, "/", timeout=timeout)
    if status != HTTPStatus.OK:
        raise ValueError(f"it answers with HTTP status {status}")
    try:
        return _state(json.loads(body))
    except RecursionError:
        raise ValueError("it answers with JSON of no use") from None


def measure_link(endpoint: str, *, seconds: float = 2.0, side_port: int | None = None) -> Link:
    """Latency and bandwidth from the worker at ``endpoint`` to here, within about ``seconds`` and some tries.

    Raises:
        OSError, ValueError: as ``ask_side_port``.
    """
    host, port = parse_endpoint(endpoint)
    port = side_port or port + 1
    tries = []
    for _ in range(3):
        begin = time.monotonic()
        fetch(host, port, "/", timeout=seconds)
        tries.append(time.monotonic() - begin)
    pieces = stream(host, port, "/bytes", timeout=10 * seconds)
    # The first piece comes after the request's own round trip.
    next(pieces, b"")
    received, begin = 0, time.monotonic()
    for piece in pieces:
        received += len(piece)
        if time.monotonic() - begin > seconds:
            break
    return Link(min(tries), received / max(time.monotonic() - begin, 1e-6))


def available_memory() -> int | None:
    """Bytes of main memory that programs could still get; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def has_client(port: int) -> bool | None:
    """Whether a connection to local ``port`` is open (state 1 of Linux' table); None where this cannot be told."""
    try:
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    return any(words[1].endswith(f":{port:04X}") and words[3] == "01" for words in (line.split() for line in lines))


def _state(table: Any) -> WorkerState:
    if not isinstance(table, dict) or table.get("service") != SERVICE:
        raise ValueError("what answers there is no kimi-gguf worker")
    try:
        major, minor, patch = (int(number) for number in table["protocol"])
        return WorkerState(
            build=str(table["build"]),
            protocol=(major, minor, patch),
            state=str(table["state"]),
            instance=int(table["instance"]),
            memory=tuple((int(free), int(total)) for free, total in table["memory"]),
            available=None if table["available"] is None else int(table["available"]),
            client=None if table["client"] is None else bool(table["client"]),
            cache=bool(table["cache"]),
            reason=str(table["reason"])[:1000],
        )
    except (KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"its answer cannot be read: {error}") from None
