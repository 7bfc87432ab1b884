"""A Hub on loopback: the HTTP API as huggingface_hub 2.4 uses it without xet, with faults on demand.

In a test's own process (``HF_ENDPOINT`` is set by ``conftest.py`` before the library is imported):

    hub.store.add_folder("org/model", folder)
    hub.fault("GET .*resolve", "status", status=429, headers={"Retry-After": "1"}, times=2)
    [r.path for r in hub.requests if r.authorization]

As a process of its own, to be killed: ``python tests/hub_server.py ROOT PORT [FAULTS-AS-JSON]``.

Large files are served as the Hub does: ``resolve`` redirects to signed addresses on another host (here ``localhost``
beside 127.0.0.1), which must never see a token.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from hub_api import CHUNK, Answer, HubApi, as_json
from hub_store import HubFault, HubStore

TOKEN = "hf_" + "testtokenforloopback" * 2

Kind = Literal["status", "drop", "cut", "short", "whole", "flip", "late", "hang", "slow"]


@dataclass
class Fault:
    """What goes wrong with the ``times`` requests after the first ``skip`` whose "METHOD /path" matches.

    status  answered by ``status`` and ``headers``, nothing done
    late    done, then answered by ``status``
    drop    the connection is closed without an answer
    cut     the connection is closed after ``at`` bytes of the answer's body (of an upload's: of the request's body)
    short   a range ends ``at`` bytes after its begin, and the answer says so
    whole   the range is ignored: 200 and everything
    flip    the byte at offset ``at`` of the file is another one
    hang    nothing is said for ``seconds``
    slow    ``rate`` bytes a second
    """

    match: str
    kind: Kind
    times: int = 1
    skip: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    at: int = 0
    seconds: float = 0.0
    rate: int = 1 << 20


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    host: str
    range: str | None
    authorization: str | None


class HubServer(ThreadingHTTPServer):
    """Serves ``store``; ``multipart`` makes uploads above that many bytes go in parts of that size."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.connections: set[socket.socket] = set()
        self.store = HubStore(root)
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens = {TOKEN: "tester"}
        self.multipart: int | None = None
        self.lock = Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, match: str, kind: Kind, **how: Any) -> Fault:
        """Let a fault happen to requests that come from now on."""
        fault = Fault(match, kind, **how)
        self.faults.append(fault)
        return fault

    def due(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, request):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def start(self) -> HubServer:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        # A client that keeps a connection must not meet this Hub in the next test.
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(HubApi, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes; without this the second waits for the first one's acknowledgement.
    disable_nagle_algorithm = True
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.length = int(self.headers.get("Content-Length") or 0)
        seen = Request(
            self.command, unquote(url.path), self.headers["Host"], self.headers["Range"], self.headers["Authorization"]
        )
        self.server.requests.append(seen)
        fault = self.server.due(f"{self.command} {unquote(url.path)}")
        kind = fault.kind if fault else None
        if fault and kind == "hang":
            time.sleep(fault.seconds)
        if kind == "drop":
            self._hang_up()
            return
        if fault and kind == "cut" and self.length:
            self.rfile.read(fault.at)
            self._hang_up()
            return
        try:
            if fault and kind == "status":
                self.rfile.read(self.length)
                answer = self._fault_answer(fault)
            else:
                answer = self.route(url.path)
                if fault and kind == "late":
                    answer = self._fault_answer(fault)
        except HubFault as error:
            answer = self._error(error)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(answer, fault)

    def _fault_answer(self, fault: Fault) -> Answer:
        return as_json({"error": f"injected {fault.status}"}, fault.status, **fault.headers)

    def _error(self, error: HubFault) -> Answer:
        headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
        return as_json({"error": error.message}, error.status, **headers)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        size = answer.body.stat().st_size if isinstance(answer.body, Path) else len(answer.body)
        begin, end, status = 0, size, answer.status
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if status == 200 and wanted and kind != "whole" and self.command in ("GET", "HEAD"):
            begin, end = int(wanted[1]), min(size, int(wanted[2]) + 1 if wanted[2] else size)
            if begin >= size:
                answer, status, begin, end = Answer(416, b"", {"Content-Range": f"bytes */{size}"}), 416, 0, 0
            else:
                if fault and kind == "short":
                    end = min(end, begin + fault.at)
                status = 206
                answer.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.send_response(status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(answer.body, begin, end, fault)

    def _send_body(self, body: bytes | Path, begin: int, end: int, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        stop = begin + fault.at if fault and kind == "cut" else end
        file = body.open("rb") if isinstance(body, Path) else None
        if file:
            file.seek(begin)
        at = begin
        while at < min(stop, end):
            n = min(CHUNK, min(stop, end) - at)
            data = file.read(n) if file else bytes(body[at : at + n])  # type: ignore[index]
            if fault and kind == "flip" and at <= fault.at < at + n:
                changed = bytearray(data)
                changed[fault.at - at] ^= 1
                data = bytes(changed)
            if fault and kind == "slow":
                time.sleep(n / fault.rate)
            self.wfile.write(data)
            at += n
        if stop < end:
            self._hang_up()


if __name__ == "__main__":
    server = HubServer(Path(sys.argv[1]), int(sys.argv[2]))
    server.faults = [Fault(**fault) for fault in json.loads(sys.argv[3] if len(sys.argv) > 3 else "[]")]
    sys.stdout.write(f"{server.endpoint}\n")
    sys.stdout.flush()
    server.serve_forever()
