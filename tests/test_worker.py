"""The verb ``cluster worker``: supervised, careful about its address, seeded from a local copy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from cluster_support import alive, children, free_ports, kill, running, until
from runtime_support import EXACT, top_difference

from kimi_gguf.cli.cluster import command as cluster
from kimi_gguf.cluster.llama_engine import LlamaEngine
from kimi_gguf.cluster.rpc import ask_worker, parse_endpoint
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.cluster.side_port import LINK_BYTES, WorkerState, ask_side_port, measure_link
from kimi_gguf.cluster.small_http import SmallServer, fetch, json_answer
from kimi_gguf.cluster.supervise import Backoff, Program
from kimi_gguf.cluster.tensor_cache import THRESHOLD, parse_layers, seed_cache
from kimi_gguf.cluster.worker import watch
from kimi_gguf.reference.gguf_maker import byte_text, make_gguf
from kimi_gguf.reference.oracle import CASES
from quant.errors import UsageError
from quant.gguf_parser import parse_gguf

CASE = next(case for case in CASES if case.name == "k31_top8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts are above the cache's threshold."""
    config = CASE.config
    wide = replace(config, moe=replace(config.moe, experts=64, width=512, latent=256))
    return make_gguf(tmp_path_factory.mktemp("model") / "wide.gguf", wide, seed=1)


@contextmanager
def counting_proxy(endpoint: str) -> Iterator[tuple[str, list[int]]]:
    """Passes connections on to ``endpoint``; the list's element is the bytes that went there."""
    server = socket.create_server(("127.0.0.1", 0))
    sent = [0]

    def pump(source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                target.sendall(data)
                if counts:
                    sent[0] += len(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, socket.create_connection(parse_endpoint(endpoint)) as worker:
                    back = threading.Thread(target=pump, args=(worker, client, False), daemon=True)
                    back.start()
                    pump(client, worker, True)
                    back.join()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}", sent
    finally:
        server.close()


@pytest.mark.runtime
def test_a_killed_server_is_started_again_and_nothing_is_left_behind(runtime: Runtime, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    endpoint = f"127.0.0.1:{port}"
    with running(["cluster", "worker", "--bind", endpoint, "--threads", "1"], tmp_path / "worker.txt") as verb:
        until("it runs", lambda: "worker at" in verb.text)
        state = ask_side_port(endpoint)
        assert state.state == "running" and state.instance == 1 and state.client is False
        assert state.build == runtime.facts.digest and state.protocol == runtime.facts.rpc_protocol
        assert state.memory == ask_worker(endpoint, runtime.facts.rpc_protocol).memory
        assert measure_link(endpoint, seconds=0.2).bandwidth > 1e6
        (server,) = children(verb.process.pid)
        kill(server)
        until("it runs again", lambda: (s := ask_side_port(endpoint)).state == "running" and s.instance == 2)
        assert "SIGKILL" in ask_side_port(endpoint).reason
        assert ask_worker(endpoint, runtime.facts.rpc_protocol, timeout=20)
        (server,) = children(verb.process.pid)
        assert verb.stop(signal.SIGINT) == 0
        assert not alive(server)


@pytest.mark.runtime
def test_the_server_dies_with_a_killed_supervisor(runtime: Runtime, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running(["cluster", "worker", "--bind", f"127.0.0.1:{port}"], tmp_path / "worker.txt") as verb:
        until("it runs", lambda: "worker at" in verb.text)
        (server,) = children(verb.process.pid)
        kill(verb.process.pid)
        verb.process.wait(10)
        until("the server is gone", lambda: not alive(server), 10)


def test_a_server_that_is_stopped_or_answers_nobody_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimi_gguf.cluster.worker._CHECK_SECONDS", 0.0)
    state = WorkerState("build", (7, 0, 0), "running")
    program = Program(["sleep", "100"], os.environ, tmp_path / "log")
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        endpoint = f"127.0.0.1:{port}"
        assert watch(program, endpoint, state, threading.Event()) == "the server answers nobody"
        os.kill(program.pid, signal.SIGSTOP)
        until("it is stopped", lambda: program.halted)
        assert watch(program, endpoint, state, threading.Event()) == "the server is stopped by a signal"
    finally:
        program.stop(0.1)
    assert watch(program, endpoint, state, threading.Event()) is None


def test_waits_double_and_are_short_again_after_half_a_minute() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    # Losses a minute apart never add up.
    assert [backoff.after(30) for _ in range(3)] == [0.5, 0.5, 0.5]


@pytest.mark.runtime
def test_a_seeded_worker_is_sent_hashes_and_gives_the_same_numbers(
    model: Path, runtime: Runtime, tmp_path: Path
) -> None:
    ids = list(byte_text(40, 4).encode())
    large = [t for t in parse_gguf(model).tensors if t.nbytes > THRESHOLD and t.name != "token_embd.weight"]
    nbytes = sum(t.nbytes for t in large)
    assert nbytes > model.stat().st_size // 2
    sent, logits = {}, {}
    for seeded in (False, True):
        (port,) = free_ports(1)
        arguments = ["cluster", "worker", "--bind", f"127.0.0.1:{port}", "--cache", str(tmp_path / f"{seeded}")]
        arguments += ["--threads", "1", *(["--seed", str(model)] if seeded else [])]
        with running(arguments, tmp_path / "worker.txt") as verb:
            until("it runs", lambda verb=verb: "worker at" in verb.text)  # type: ignore[misc]
            with counting_proxy(f"127.0.0.1:{port}") as (proxy, count):
                with LlamaEngine(model, replace(EXACT, rpc=(proxy,)), runtime=runtime) as engine:
                    logits[seeded] = engine.decode(ids).logits
                sent[seeded] = count[0]
    assert sent[False] > nbytes
    assert sent[True] < sent[False] - 0.99 * nbytes
    assert top_difference(logits[True], logits[False]).max() == 0
    # What the server itself kept has the names and the bytes of what seeding writes.
    kept, written = tmp_path / "False" / "rpc", tmp_path / "True" / "rpc"
    assert sorted(p.name for p in kept.iterdir()) == sorted(p.name for p in written.iterdir())
    assert all((kept / p.name).read_bytes() == p.read_bytes() for p in written.iterdir())


def test_seeding_again_writes_nothing_and_layers_can_be_chosen(model: Path, tmp_path: Path) -> None:
    first = seed_cache(model, tmp_path)
    assert first.complete and first.written == first.nbytes > 0
    assert seed_cache(model, tmp_path).written == 0
    fewer = seed_cache(model, tmp_path / "fewer", layers=parse_layers("0-2"))
    assert 0 < fewer.nbytes < first.nbytes
    assert sum(p.stat().st_size for p in tmp_path.iterdir() if p.is_file()) == first.nbytes
    with pytest.raises(UsageError, match="names no layers"):
        parse_layers("5-3")


@pytest.mark.parametrize("address", ["0.0.0.0:50052", "0:50052"])
def test_every_interface_is_refused(address: str, runtime: Runtime) -> None:
    done = CliRunner().invoke(cluster, ["worker", "--bind", address])
    assert isinstance(done.exception, UsageError)
    assert "--insecure-bind" in str(done.exception)


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[" * 100_000, b"{}", b'{"service": []}', b'"memory"'],
    ids=["nothing", "no JSON", "deep", "empty", "another", "a text"],
)
def test_an_answer_of_no_worker_is_a_value_error(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_gguf.cluster.side_port.fetch", lambda *_, **__: (200, body))
    with pytest.raises(ValueError):
        ask_side_port("127.0.0.1:1000")


def test_numbers_of_a_worker_that_are_none_are_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = asdict(WorkerState("b", (1, 2, 3)))
    for damage in ({"instance": float("inf")}, {"memory": 3}, {"protocol": [1]}, {"available": "x"}):
        body = json.dumps(sound | damage).encode()
        monkeypatch.setattr("kimi_gguf.cluster.side_port.fetch", lambda *_, body=body, **__: (200, body))
        with pytest.raises(ValueError):
            ask_side_port("127.0.0.1:1000")


def test_layers_of_no_model_are_refused() -> None:
    done = CliRunner().invoke(cluster, ["worker", "--seed-layers", "0-3"])
    assert isinstance(done.exception, UsageError) and "--seed" in str(done.exception)


def test_a_port_in_use_is_named(runtime: Runtime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = CliRunner().invoke(cluster, ["worker", "--bind", address])
        assert isinstance(done.exception, UsageError)
        assert f"{address} cannot be listened on" in str(done.exception)


def test_the_side_port_reads_little_and_answers_get_alone() -> None:
    with SmallServer("127.0.0.1", 0, lambda path: json_answer({"path": path})) as server:
        assert fetch("127.0.0.1", server.port, "/a?b", timeout=5) == (200, b'{"path": "/a"}\n')
        for request in (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"\x00" * 20000, b"GET / HTTP/1.1\r\n" * 2000):
            with (
                socket.create_connection(("127.0.0.1", server.port), 5) as connection,
                contextlib.suppress(OSError),
            ):
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 405")
        assert json.loads(fetch("127.0.0.1", server.port, "/", timeout=5)[1]) == {"path": "/"}


def test_a_client_gives_up_on_what_never_answers_or_never_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        fetch("127.0.0.1", silent.getsockname()[1], "/", timeout=0.3)
    with (
        SmallServer("127.0.0.1", 0, lambda path: json_answer("x" * LINK_BYTES)) as endless,
        pytest.raises(ValueError, match="too long"),
    ):
        fetch("127.0.0.1", endless.port, "/", timeout=5)
