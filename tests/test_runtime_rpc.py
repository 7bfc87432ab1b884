"""RPC workers: the same numbers as without them, and clear errors from workers that are wrong, busy, silent or dead."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_support import EXACT, free_port, rpc_workers, run_engine, top_difference

from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.llama_engine import LlamaEngine
from kimi_gguf.cluster.rpc import ask_worker, parse_endpoint
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.gguf_maker import byte_text
from kimi_gguf.reference.oracle import CASES
from quant.errors import UsageError

pytestmark = pytest.mark.runtime

PROTOCOL = (7, 0, 0)
TOP_8 = next(case for case in CASES if case.name == "k31_top8")
# Three layers on the first worker; two and the output on the second.
HALVES = (3.0, 3.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TOP_8.make(tmp_path_factory.mktemp("rpc") / "model.gguf")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return list(byte_text(600, 4).encode())


@contextmanager
def fake_worker(answer: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """Accepts one client, answers its first message with ``answer`` (never, when None), and keeps what it got."""
    got: list[bytes] = []
    done = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            got.append(connection.recv(4096))
            if answer is not None:
                connection.sendall(answer)
                while data := connection.recv(4096):
                    got.append(data)
            else:
                done.wait()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}", got
    finally:
        done.set()
        server.close()
        thread.join(10)


@contextmanager
def cutting_proxy(endpoint: str, limit: int) -> Iterator[str]:
    """Passes connections on to ``endpoint`` and cuts the one that sends more than ``limit`` bytes."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket, allowed: float) -> None:
        with contextlib.suppress(OSError):
            while allowed > 0 and (data := source.recv(65536)):
                target.sendall(data)
                allowed -= len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                worker = socket.create_connection(parse_endpoint(endpoint))
                back = threading.Thread(target=pump, args=(worker, client, float("inf")), daemon=True)
                back.start()
                pump(client, worker, limit)
                back.join()
                client.close()
                worker.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.close()


def hello(major: int, minor: int) -> bytes:
    """A worker's answer to HELLO."""
    return struct.pack("<Q3Bx24s", 28, major, minor, 0, bytes(24))


def test_two_workers_give_the_local_numbers_and_experts(
    model: Path, ids: list[int], runtime: Runtime, tmp_path: Path
) -> None:
    local = run_engine(model, ids, runtime)
    with rpc_workers(runtime, 2, tmp_path / "workers.log") as workers:
        options = replace(EXACT, rpc=tuple(endpoint for endpoint, _ in workers), tensor_split=HALVES)
        with LlamaEngine(model, options, runtime=runtime) as engine:
            log = engine.said()
            remote = engine.decode(ids, trace=("experts", "selections"))
            # The next token uses the workers' stored graph.
            following = engine.decode(ids[:8], outputs="last").logits
    assert "RPC0" in log and "RPC1" in log
    assert top_difference(remote.logits, local.logits).max() <= 1e-4
    assert np.isfinite(following).all()
    for layer, chosen in local.experts.items():
        np.testing.assert_array_equal(remote.experts[layer], chosen)
    for layer, rows in local.selections.items():
        for ours, theirs in zip(remote.selections[layer], rows, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_killed_worker_is_an_error_within_seconds(
    model: Path, ids: list[int], runtime: Runtime, tmp_path: Path
) -> None:
    with rpc_workers(runtime, 2, tmp_path / "workers.log") as workers:
        options = replace(EXACT, rpc=tuple(endpoint for endpoint, _ in workers), tensor_split=HALVES)
        with LlamaEngine(model, options, runtime=runtime) as engine:
            engine.decode(ids[:100])
            endpoint, process = workers[1]
            process.kill()
            process.wait()
            begin = time.monotonic()
            with pytest.raises(RuntimeFault, match=f"RPC server {endpoint} crashed, was lost"):
                engine.decode(ids[:100])
            assert time.monotonic() - begin < 30
        # The other worker serves the next client.
        assert ask_worker(workers[0][0], runtime.facts.rpc_protocol, timeout=30).memory


def test_a_stopped_worker_is_an_error_after_the_time_limit(
    model: Path, ids: list[int], runtime: Runtime, tmp_path: Path
) -> None:
    with rpc_workers(runtime, 1, tmp_path / "workers.log") as workers:
        options = replace(EXACT, rpc=(workers[0][0],), timeout=2.0)
        with LlamaEngine(model, options, runtime=runtime) as engine:
            engine.decode(ids[:8])
            workers[0][1].send_signal(signal.SIGSTOP)
            with pytest.raises(RuntimeFault, match=r"no answer within 2 s|was lost"):
                engine.decode(ids[:8])


def test_a_connection_cut_while_weights_are_sent_is_an_error(model: Path, runtime: Runtime, tmp_path: Path) -> None:
    with (
        rpc_workers(runtime, 1, tmp_path / "workers.log") as workers,
        cutting_proxy(workers[0][0], model.stat().st_size // 4) as endpoint,
        pytest.raises(RuntimeFault, match=f"RPC server {endpoint} crashed, was lost"),
    ):
        LlamaEngine(model, replace(EXACT, rpc=(endpoint,)), runtime=runtime)


def test_another_protocol_is_reported_before_weights_are_sent(model: Path, runtime: Runtime) -> None:
    with fake_worker(hello(6, 2)) as (endpoint, got):
        options = replace(EXACT, rpc=(endpoint,))
        with pytest.raises(RuntimeFault, match=f"{endpoint} speaks RPC protocol 6.2.0, this runtime 7.0.0"):
            LlamaEngine(model, options, runtime=runtime)
    assert b"".join(got) == struct.pack("<BQ", 14, 24) + bytes(24)


def test_llama_cpp_itself_reports_both_versions_and_goes_on(model: Path, runtime: Runtime) -> None:
    """``llama-server --rpc`` and others use the client in the library, which used to abort here."""
    with fake_worker(hello(6, 2)) as (endpoint, _):
        command = [str(runtime.program("llama-perplexity")), "--rpc", endpoint, "-m", str(model), "-f", "none"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "server 6.2.0, client 7.0.0" in done.stderr
    assert f"no usable RPC server at {endpoint}" in done.stderr


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "did not answer within 0.5 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not shake hands in RPC protocol 7.0.0"),
        (b"", "does not shake hands|did not answer"),
        (hello(7, 1), "speaks RPC protocol 7.1.0, this runtime 7.0.0"),
    ],
    ids=["silent", "a web server", "nothing", "newer minor version"],
)
def test_what_is_no_fitting_worker_is_named(answer: bytes | None, message: str) -> None:
    with fake_worker(answer) as (endpoint, _), pytest.raises(RuntimeFault, match=message) as caught:
        ask_worker(endpoint, PROTOCOL, timeout=0.5)
    assert endpoint in caught.value.message


def test_nobody_at_the_port_is_an_error() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(RuntimeFault, match=f"no RPC worker at {endpoint}"):
        ask_worker(endpoint, PROTOCOL)


def test_a_worker_tells_its_memory_and_frees_itself(runtime: Runtime, tmp_path: Path) -> None:
    with rpc_workers(runtime, 1, tmp_path / "workers.log") as workers:
        for _ in range(3):
            worker = ask_worker(workers[0][0], runtime.facts.rpc_protocol)
        assert worker.protocol == runtime.facts.rpc_protocol
        assert len(worker.memory) == 1
        free, total = worker.memory[0]
        assert 0 < free <= total


def test_a_client_that_says_nothing_does_not_block_a_worker(runtime: Runtime, tmp_path: Path) -> None:
    with rpc_workers(runtime, 1, tmp_path / "workers.log") as workers:
        host, port = parse_endpoint(workers[0][0])
        with socket.create_connection((host, port)):
            # The worker gives the silent one ten seconds.
            assert ask_worker(workers[0][0], runtime.facts.rpc_protocol, timeout=30).memory


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":50052", "host:0", "host:70000", "::1:50052", "host:x"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not a worker's address"):
        parse_endpoint(endpoint)
