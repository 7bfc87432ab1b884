"""The service's own port: passes requests on to the head, and answers for it when it is lost.

A head that loses a worker ends without a word. Here a request then gets a proper answer: 503 when nothing of the
response had come, an error event at the end of a stream that had begun. One request per connection.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Self

from kimi_gguf.cluster.small_http import json_answer, write_answer

LOCAL = "127.0.0.1"
"""Where heads listen."""

_MAX_HEADER = 1 << 16
_MAX_BODY = 1 << 30
_MAX_DIGITS = 20
_HEADER_SECONDS = 30.0
_STALL_SECONDS = 300.0
_CONNECT_SECONDS = 10.0
_PIECE = 1 << 16
# Two descriptors each, and select() takes 1024.
_MAX_CONNECTIONS = 256
_END = b"0\r\n\r\n"
_MAX_CHUNK_LINE = 1 << 10
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Front:
    """Listens from creation until ``close``; a context manager.

    Args:
        host, port: where to listen; port 0 takes a free one.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._head: int | None = None
        self._reason = "the service is starting"
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._closed = threading.Event()
        self._socket = socket.create_server((host, port), backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="front", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, head: int) -> None:
        """Pass requests on to this local port from now on."""
        with self._lock:
            self._head = head

    def shut(self, reason: str) -> None:
        """Answer requests with 503 and ``reason`` from now on."""
        with self._lock:
            self._head, self._reason = None, reason

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        # Wakes up a waiting accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(2.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                self._closed.wait(0.05)
                continue
            if not self._free.acquire(blocking=False):
                with client, suppress(OSError):
                    client.settimeout(0.5)
                    client.sendall(_FULL)
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, suppress(OSError, ValueError):
                client.settimeout(_HEADER_SECONDS)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                header, rest = _read_header(client, time.monotonic() + _HEADER_SECONDS)
                with self._lock:
                    head = self._head
                if head is None:
                    self._unavailable(client)
                    return
                self._pass_on(client, head, header, rest)
        finally:
            self._free.release()

    def _pass_on(self, client: socket.socket, port: int, header: bytes, rest: bytes) -> None:
        fields = _fields(header)
        coding, length = fields.get("transfer-encoding", ""), fields.get("content-length", "0")
        if coding.lower() not in ("", "chunked") or not (length.isascii() and length.isdecimal()):
            write_answer(client, json_answer(_error(400, "no body of that length or coding"), HTTPStatus.BAD_REQUEST))
            return
        if len(length) > _MAX_DIGITS or int(length) > _MAX_BODY:
            write_answer(client, json_answer(_error(413, "too long"), HTTPStatus.REQUEST_ENTITY_TOO_LARGE))
            return
        if fields.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            head = socket.create_connection((LOCAL, port), _CONNECT_SECONDS)
        except OSError:
            self._unavailable(client)
            return
        with head:
            client.settimeout(_STALL_SECONDS)
            head.settimeout(_STALL_SECONDS)
            broken = not _send(head, _closing(header))
            for piece in _chunked(client, rest) if coding else _counted(client, rest, int(length)):
                # A lost head's client is heard out, so that it listens to the answer.
                broken = broken or not _send(head, piece)
            self._relay(client, head)

    def _relay(self, client: socket.socket, head: socket.socket) -> None:
        """Pass the response back; ends early when the client goes."""
        response = b""
        while b"\r\n\r\n" not in response:
            piece = _receive(head, client)
            if piece is None:
                return
            response += piece
            if not piece or len(response) > _MAX_HEADER + _PIECE:
                self._unavailable(client)
                return
        header, _, body = response.partition(b"\r\n\r\n")
        fields = _fields(header)
        stream = _Chunks() if "chunked" in fields.get("transfer-encoding", "") else None
        client.sendall(_closing(header))
        while True:
            if stream is not None:
                stream.take(body)
            client.sendall(body)
            piece = _receive(head, client)
            if piece is None:
                return
            if not piece:
                break
            body = piece
        if stream is not None and stream.between and "event-stream" in fields.get("content-type", ""):
            with self._lock:
                event = f"data: {json.dumps(_error(503, self._lost()))}\n\n".encode()
            client.sendall(f"{len(event):x}\r\n".encode() + event + b"\r\n" + _END)

    def _unavailable(self, client: socket.socket) -> None:
        with self._lock:
            message = self._lost()
        headers = (("Retry-After", "5"),)
        write_answer(client, json_answer(_error(503, message), HTTPStatus.SERVICE_UNAVAILABLE, headers))

    def _lost(self) -> str:
        return "the server was lost, the service restarts" if self._head is not None else self._reason


class _Chunks:
    """Follows a body in chunks; ``between`` when it stands between two of them and the last has not come."""

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def between(self) -> bool:
        return not self._ended and self._left == 0 and not self._line

    def take(self, data: bytes) -> None:
        """The next bytes of the body."""
        while data and not self._ended:
            if self._left:
                size = min(self._left, len(data))
                self._left -= size
                data = data[size:]
                continue
            line, mark, data = (self._line + data).partition(b"\r\n")
            if len(line) > _MAX_CHUNK_LINE:
                raise ValueError("no chunk")
            if not mark:
                self._line = line
                return
            self._line = b""
            size = int(line.split(b";")[0], 16)
            self._ended = size == 0
            self._left = size + 2 if size else 0


def _read_header(connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """Request line and fields, and what came after them."""
    data = b""
    while b"\r\n\r\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > _MAX_HEADER:
            raise ValueError("no request")
        connection.settimeout(left)
        piece = connection.recv(_PIECE)
        if not piece:
            raise ValueError("no request")
        data += piece
    header, _, rest = data.partition(b"\r\n\r\n")
    return header, rest


def _counted(client: socket.socket, rest: bytes, length: int) -> Iterator[bytes]:
    """A body of ``length`` bytes, of which ``rest`` came with the header."""
    piece = rest[:length]
    while True:
        yield piece
        length -= len(piece)
        if not length:
            return
        piece = client.recv(min(length, _PIECE))
        if not piece:
            raise ValueError("the client left within its request")


def _chunked(client: socket.socket, rest: bytes) -> Iterator[bytes]:
    """A body in chunks as it came, of which ``rest`` came with the header."""
    chunks, total, piece, end = _Chunks(), 0, rest, b""
    while True:
        chunks.take(piece)
        yield piece
        total += len(piece)
        end = (end + piece)[-4:]
        # Trailing fields may follow the last chunk; an empty line ends them.
        if chunks.ended and end == b"\r\n\r\n":
            return
        piece = client.recv(_PIECE)
        if not piece or total > _MAX_BODY:
            raise ValueError("no end of the request")


def _fields(header: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in header.decode("latin-1").split("\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _closing(header: bytes) -> bytes:
    """The header with ``Connection: close``, which says that there is one request per connection."""
    dropped = (b"connection:", b"keep-alive:", b"expect:")
    lines = [line for line in header.split(b"\r\n") if not line.lower().startswith(dropped)]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def _send(target: socket.socket, data: bytes) -> bool:
    try:
        target.sendall(data)
    except OSError:
        return False
    return True


def _receive(head: socket.socket, client: socket.socket) -> bytes | None:
    """The head's next bytes, none when it is lost or done; None when the client has gone."""
    watched = [head, client]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if head in ready:
            try:
                return head.recv(_PIECE)
            except OSError:
                return b""
        try:
            if not client.recv(_PIECE):
                return None
        except OSError:
            return None


def _error(code: int, message: str) -> dict[str, object]:
    return {"error": {"code": code, "message": message, "type": "unavailable_error"}}
