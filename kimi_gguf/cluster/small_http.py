"""The least HTTP that supervisors need: a server that reads little and answers from a function, and a client.

Every read and write is bounded in bytes and in seconds, whatever the other side does; connections beyond a small
number are refused. Requests have no bodies: one that comes with one is answered without looking at it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

_MAX_HEADER = 8192
_MAX_DRAINED = 1 << 20
_READ_SECONDS = 5.0
_WRITE_SECONDS = 30.0
_MAX_CONNECTIONS = 16
_ACCEPT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: status, pieces of the body whose sizes add up to ``size``, type, and further headers."""

    status: HTTPStatus
    body: Iterable[bytes]
    size: int
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def json_answer(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    """An answer with ``value`` as JSON."""
    data = json.dumps(value).encode() + b"\n"
    return Answer(status, (data,), len(data), headers=headers)


class SmallServer:
    """Answers requests in threads of its own from creation until ``close``; a context manager.

    Args:
        host, port: where to listen; port 0 takes a free one.
        answer: the response to a GET of a path, without query.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, answer: Callable[[str], Answer]) -> None:
        self._answer = answer
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._closed = threading.Event()
        self._socket = socket.create_server((host, port))
        self._socket.settimeout(_ACCEPT_SECONDS)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"http-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        # Wakes up a waiting accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(2 * _ACCEPT_SECONDS)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.wait(0.05):
                    return
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError, ValueError):
                method, path = _read_request(connection)
                if method != "GET":
                    answer = json_answer({"error": "GET only"}, HTTPStatus.METHOD_NOT_ALLOWED)
                else:
                    answer = self._answer(path)
                write_answer(connection, answer)
        finally:
            self._free.release()


def fetch(host: str, port: int, path: str, *, timeout: float, limit: int = 1 << 16) -> tuple[int, bytes]:
    """Status and body of a GET; the connection is used once.

    Args:
        timeout: seconds for everything.
        limit: bytes of the body at most.

    Raises:
        OSError: nobody listens there, or the time is over (``TimeoutError``).
        ValueError: what came is no HTTP, or too long.
    """
    head, body = b"", b""
    for piece in stream(host, port, path, timeout=timeout):
        if b"\r\n\r\n" not in head:
            head += piece
            if len(head) > _MAX_HEADER + limit:
                raise ValueError("the answer is too long")
        else:
            body += piece
            if len(body) > limit:
                raise ValueError("the answer is too long")
    header, mark, first = head.partition(b"\r\n\r\n")
    words = header.split(b"\r\n", 1)[0].split()
    if not mark or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("the answer is not HTTP")
    return int(words[1]), first + body


def stream(host: str, port: int, path: str, *, timeout: float) -> Iterator[bytes]:
    """The pieces of the answer to a GET as they come, header included.

    Raises:
        OSError: as ``fetch``.
    """
    deadline = time.monotonic() + timeout
    with socket.create_connection((host, port), timeout) as connection:
        request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode("ascii"))
        while True:
            connection.settimeout(_left(deadline))
            piece = connection.recv(1 << 18)
            if not piece:
                return
            yield piece


def _read_request(connection: socket.socket) -> tuple[str, str]:
    """Method and path of a request.

    Raises:
        ValueError: no HTTP, or too long.
        OSError: it did not come in time.
    """
    deadline = time.monotonic() + _READ_SECONDS
    data = b""
    while b"\r\n\r\n" not in data:
        connection.settimeout(_left(deadline))
        piece = connection.recv(_MAX_HEADER)
        data += piece
        if not piece or len(data) > _MAX_HEADER:
            raise ValueError("no request")
    words = data.split(b"\r\n", 1)[0].decode("ascii").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("no HTTP")
    return words[0], words[1].partition("?")[0]


def write_answer(connection: socket.socket, answer: Answer) -> None:
    """Send an answer, and hear the rest of the request out within limits, so that it is not thrown away.

    Raises:
        OSError: the peer has gone, or does not listen.
    """
    deadline = time.monotonic() + _WRITE_SECONDS
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {answer.size}",
        *(f"{name}: {value}" for name, value in answer.headers),
        "Connection: close",
    ]
    connection.settimeout(_left(deadline))
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
    for piece in answer.body:
        connection.settimeout(_left(deadline))
        connection.sendall(piece)
    # Closing with unread data would make the peer's system throw the answer away.
    connection.shutdown(socket.SHUT_WR)
    drained = 0
    deadline = time.monotonic() + _READ_SECONDS
    while drained < _MAX_DRAINED:
        connection.settimeout(_left(deadline))
        piece = connection.recv(1 << 16)
        if not piece:
            return
        drained += len(piece)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
