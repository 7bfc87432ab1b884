"""The verb ``serve``: the trained tiny model over workers, which are lost; no hang, no leaked process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cluster_support import Verb, alive, children, free_ports, kill, running, until

import kimi_gguf
from convert.shapes import released_config
from kimi_gguf import convert
from kimi_gguf.cli.serve import command
from kimi_gguf.cluster.front import Front
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.cluster.serve_flags import ServeOptions, checkpoints, server_arguments
from kimi_gguf.cluster.serve_supervisor import SILENT_SECONDS, Heard
from kimi_gguf.cluster.side_port import ask_side_port
from kimi_gguf.cluster.small_http import fetch
from quant.errors import KimiGgufError, UsageError

FOLDER = Path(kimi_gguf.__file__).parent / "data" / "tiny-k31"
PROMPT = "It was a truth universally acknowledged, that"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny.gguf"
    convert(str(FOLDER), quant="MXFP4_MOE", outfile=str(path))
    return path


Where = Callable[[Path, list[str]], list[str]]


@dataclass
class Service:
    """A service over two workers."""

    port: int
    head: Verb
    workers: list[Verb]
    endpoints: list[str]

    def post(self, path: str, body: dict[str, Any], *, timeout: float = 60) -> Any:
        """Answer of the API; an exception of ``http.client`` or ``OSError`` when the service is lost meanwhile."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"HTTP status {response.status}: {data[:200]!r}")
        return json.loads(data)

    def complete(self, count: int, **more: Any) -> str:
        """Greedy continuation of the prompt."""
        body = {"prompt": PROMPT, "n_predict": count, "temperature": 0, "ignore_eos": True, **more}
        return str(self.post("/completion", body)["content"])

    @property
    def healthy(self) -> bool:
        try:
            return fetch("127.0.0.1", self.port, "/health", timeout=5)[0] == 200
        except (OSError, ValueError):
            return False

    @property
    def processes(self) -> list[int]:
        """Every process of the service."""
        verbs = [self.head, *self.workers]
        return [pid for verb in verbs for pid in (verb.process.pid, *children(verb.process.pid))]


def by_rpc(folder: Path, addresses: list[str]) -> list[str]:
    """Flags that name the workers and leave the layers to llama.cpp."""
    return ["--rpc", ",".join(addresses)]


def by_nodes(folder: Path, addresses: list[str]) -> list[str]:
    """Flags that name a file of nodes, with the head's memory and that of the workers."""
    tables = ['[[node]]\nname = "head"\nhead = true\nmemory = "400M"\n']
    tables += [f'[[node]]\naddress = "{address}"\nmemory = "400M"\n' for address in addresses]
    path = folder / "nodes.toml"
    path.write_text("\n".join(tables))
    return ["--nodes", str(path)]


@contextmanager
def service(model: Path, folder: Path, workers: int, *flags: str, where: Where = by_rpc) -> Iterator[Service]:
    """``serve`` and its workers, ready."""
    port, *ports = free_ports(1 + workers)
    with ExitStack() as stack:
        verbs = []
        for number, each in enumerate(ports):
            arguments = ["cluster", "worker", "--bind", f"127.0.0.1:{each}", "--threads", "1"]
            verbs.append(stack.enter_context(running(arguments, folder / f"worker-{number}.txt")))
        for verb in verbs:
            until("the worker runs", lambda verb=verb: "worker at" in verb.text)  # type: ignore[misc]
        arguments = ["serve", str(model), "--port", str(port), "--context", "512", "--threads", "1"]
        arguments += ["--log", str(folder / "serve.log"), *flags]
        if ports:
            arguments += where(folder, [f"127.0.0.1:{each}" for each in ports])
        head = stack.enter_context(running(arguments, folder / "serve.txt"))
        until("the service is ready", lambda: "ready after" in head.text or head.process.poll() is not None, 120)
        assert head.process.poll() is None, head.text
        yield Service(port, head, verbs, [f"127.0.0.1:{each}" for each in ports])


@pytest.mark.runtime
def test_a_worker_killed_while_it_computes_is_survived(
    model: Path, runtime: Runtime, tmp_path: Path, say: Callable[[str], None]
) -> None:
    with service(model, tmp_path, 2) as running_service:
        whole = running_service.complete(24)
        connection = http.client.HTTPConnection("127.0.0.1", running_service.port, timeout=60)
        body = {"prompt": PROMPT, "n_predict": 450, "temperature": 0, "stream": True, "ignore_eos": True}
        connection.request("POST", "/completion", json.dumps(body))
        response = connection.getresponse()
        assert response.read(10)
        (victim,) = children(running_service.workers[1].process.pid)
        kill(victim)
        # The client's stream ends, and says why.
        rest = response.read()
        assert b'"stop":true' not in rest and b"data: {" in rest
        assert json.loads(rest.rpartition(b"data: ")[2])["error"]["code"] == 503
        connection.close()
        begin = time.monotonic()
        until("the service is back", lambda: running_service.healthy, 60)
        say(f"service back {time.monotonic() - begin:.1f} s after a worker was killed")
        assert running_service.complete(24) == whole
        assert "was lost; starting again" in running_service.head.text
        pids = running_service.processes
        assert len(pids) == 6
        assert running_service.head.stop(signal.SIGINT) == 0
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.runtime
def test_an_idle_head_whose_worker_was_restarted_is_renewed(model: Path, runtime: Runtime, tmp_path: Path) -> None:
    with service(model, tmp_path, 1, where=by_nodes) as running_service:
        assert "specified multiple times" not in (tmp_path / "serve.log").read_text()
        assert ask_side_port(running_service.endpoints[0]).client
        (victim,) = children(running_service.workers[0].process.pid)
        kill(victim)
        until("the head is renewed", lambda: running_service.head.text.count("ready after") == 2, 60)
        assert running_service.complete(4)


@pytest.mark.runtime
def test_a_worker_that_hangs_is_an_error_and_in_the_end_given_up(model: Path, runtime: Runtime, tmp_path: Path) -> None:
    with service(model, tmp_path, 1, "--worker-timeout", "1", "--give-up", "1") as running_service:
        (stopped,) = children(running_service.workers[0].process.pid)
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.raises((http.client.HTTPException, OSError)):
                running_service.complete(4)
            assert running_service.head.process.wait(60) == 1
            assert "gave up after 1 s: worker" in running_service.head.text
            assert "did not answer within" in running_service.head.text
        finally:
            os.kill(stopped, signal.SIGCONT)


@pytest.mark.runtime
def test_the_second_turn_continues_the_first_and_a_killed_head_comes_back(
    model: Path, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with service(model, tmp_path, 0, "--parallel", "2") as running_service:
        props = json.loads(fetch("127.0.0.1", running_service.port, "/props", timeout=5, limit=1 << 20)[1])
        assert props["total_slots"] == 2
        defaults = props["default_generation_settings"]
        assert defaults["n_ctx"] == 512
        assert defaults["params"]["temperature"] == 1.0
        assert defaults["params"]["top_p"] == pytest.approx(0.95)
        assert defaults["params"]["top_k"] == 0 and defaults["params"]["min_p"] == 0
        first = running_service.complete(40, id_slot=0)
        talk = f"{PROMPT}{first} And then"
        # From the cache, with the end of the last answer cut off, and from nothing.
        for prompt in (talk, talk[:-20] + " but"):
            reused = running_service.complete(24, prompt=prompt, id_slot=0)
            assert reused == running_service.complete(24, prompt=prompt, id_slot=1, cache_prompt=False)
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        assert running_service.post("/v1/chat/completions", chat)["choices"][0]["message"]["role"] == "assistant"
        (head,) = children(running_service.head.process.pid)
        kill(head)
        until("it is back", lambda: running_service.head.text.count("ready after") == 2 and running_service.healthy, 60)
        (head,) = children(running_service.head.process.pid)
        kill(running_service.head.process.pid)
        running_service.head.process.wait(10)
        until("the head dies with its supervisor", lambda: not alive(head), 10)
    # Nobody could have tidied up.
    assert list(scratch.iterdir()) == []


def test_flags_fit_the_model() -> None:
    k31 = released_config("k3.1-pro")
    options = ServeOptions(Path("m.gguf"), "m", 65536, 4, "127.0.0.1", 8080, ("a:1", "b:2"), extra=("-v",))
    words = server_arguments(options, k31)
    assert words[:2] == ["--rpc", "a:1,b:2"]
    assert words[-1] == "-v"
    pairs = dict(pairwise(words))
    assert pairs["-c"] == "262144" and pairs["--parallel"] == "4"
    assert pairs["--cache-reuse"] == "0" and pairs["--cache-ram"] == "0" and pairs["--load-mode"] == "mmap"
    placed = server_arguments(replace(options, placement=("-ts", "1,2", "-c", "300000")), k31)
    assert placed[-5:] == ["-ts", "1,2", "-c", "300000", "-v"] and placed.count("-c") == 1
    # 8 states of 464.6 MB.
    assert checkpoints(k31) == 8


def test_a_worker_that_was_heard_and_falls_silent_is_lost() -> None:
    heard = Heard()
    assert heard.silent(["a:1", "b:1"], {"a:1", "b:1"}, 0.0) is None
    assert heard.silent(["a:1", "b:1"], {"a:1"}, SILENT_SECONDS - 1) is None
    assert heard.silent(["a:1", "b:1"], {"a:1"}, SILENT_SECONDS) == "b:1"
    assert heard.silent(["a:1", "b:1"], {"b:1"}, SILENT_SECONDS + 1) is None
    assert heard.silent([], (), 9 * SILENT_SECONDS) is None


def test_while_no_head_listens_requests_are_refused_with_a_reason() -> None:
    with Front("127.0.0.1", 0) as front:
        front.shut("worker a:1 was lost")
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
        connection.request("POST", "/v1/chat/completions", "x" * 100_000)
        response = connection.getresponse()
        assert response.status == 503 and response.headers["Retry-After"] == "5"
        assert "worker a:1 was lost" in json.loads(response.read())["error"]["message"]
        connection.close()


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (b"", 503, b"the server was lost"),
        (b"HTTP/1.1 200 OK\r\nContent-", 503, b"the server was lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n4\r\na\r\nb\r\n",
            200,
            b"a\r\nbdata: {",
        ),
    ],
    ids=["nothing", "half a header", "a body", "chunks", "half a stream"],
)
def test_what_a_head_leaves_unsaid_is_said_by_the_front(sent: bytes, status: int, body: bytes) -> None:
    got: list[bytes] = []

    def head() -> None:
        connection, _ = server.accept()
        with connection:
            while not b"".join(got).endswith(b"END"):
                got.append(connection.recv(65536))
            connection.sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as server, Front("127.0.0.1", 0) as front:
        thread = threading.Thread(target=head, daemon=True)
        thread.start()
        front.open(server.getsockname()[1])
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
        connection.request("POST", "/completion", b"x" * 300_000 + b"END")
        response = connection.getresponse()
        assert response.status == status
        data = response.read()
        assert body in data
        assert (b"the server was lost" in data) == (b"ok" not in sent)
        connection.close()
        thread.join(10)
    request = b"".join(got)
    assert request.startswith(b"POST /completion HTTP/1.1\r\n") and b"Connection: close" in request
    assert request.endswith(b"x" * 300_000 + b"END")


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_request_in_chunks_is_passed_on_wherever_it_is_cut(cut: int) -> None:
    body = b"3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n"
    header = b"POST /completion HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    got: list[bytes] = []

    def head() -> None:
        connection, _ = server.accept()
        with connection:
            while not b"".join(got).endswith(body):
                got.append(connection.recv(65536))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with socket.create_server(("127.0.0.1", 0)) as server, Front("127.0.0.1", 0) as front:
        thread = threading.Thread(target=head, daemon=True)
        thread.start()
        front.open(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", front.port), 10) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(header + body[:cut])
            client.sendall(body[cut:])
            assert b"".join(iter(lambda: client.recv(4096), b"")).endswith(b"\r\n\r\nok")
        thread.join(10)
    assert b"".join(got).endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize(
    ("field", "status"),
    [
        (b"Content-Length: abc", 400),
        (b"Content-Length: -1", 400),
        (b"Content-Length: " + b"9" * 5000, 413),
        (b"Transfer-Encoding: gzip", 400),
    ],
)
def test_a_request_without_a_sound_length_is_refused(field: bytes, status: int) -> None:
    with Front("127.0.0.1", 0) as front, socket.create_connection(("127.0.0.1", front.port), 10) as client:
        front.open(1)
        client.sendall(b"POST / HTTP/1.1\r\n" + field + b"\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 %d " % status)


def test_what_cannot_work_is_refused_before_anything_is_loaded(model: Path, runtime: Runtime, tmp_path: Path) -> None:
    def fault(*arguments: str) -> KimiGgufError:
        error = CliRunner().invoke(command, [str(model), *arguments]).exception
        assert isinstance(error, KimiGgufError)
        return error

    (port,) = free_ports(1)
    assert "no RPC worker at" in fault("--port", str(port), "--rpc", f"127.0.0.1:{port}").message
    assert "above the model's" in fault("--port", str(port), "--context", "9999999").message
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = fault("--port", str(taken.getsockname()[1]))
    assert isinstance(error, UsageError) and "cannot be listened on" in error.message
    for flag in ("--load-timeout", "--worker-timeout", "--give-up"):
        assert "is no limit in seconds" in fault("--port", str(port), flag, "nan").message
    assert "cannot go to llama-server" in fault("--port", str(port), "--", "--host", "0.0.0.0").message
    assert "there is no folder" in fault("--port", str(port), "--log", str(tmp_path / "none" / "log")).message
    assert "is a folder" in fault("--port", str(port), "--log", str(tmp_path)).message
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(model.read_bytes()[:-1000])
    cut = CliRunner().invoke(command, [str(wrong), "--port", str(port)])
    assert isinstance(cut.exception, KimiGgufError)
