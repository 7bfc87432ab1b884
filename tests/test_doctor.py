"""The verb ``cluster doctor``: healthy workers pass, and what is wrong with one is named with its node."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cluster_support import free_ports, running, until
from test_runtime_rpc import fake_worker

from kimi_gguf.cli.cluster import command
from kimi_gguf.cluster import doctor_sample
from kimi_gguf.cluster.doctor import Diagnosis, NodeReport, _slow, cluster_doctor, report_text
from kimi_gguf.cluster.doctor_sample import SampleRun, difference
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.nodes import Node
from kimi_gguf.cluster.rpc import ask_worker
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.cluster.side_port import Link, SidePort, WorkerState
from kimi_gguf.reference.oracle import CASES

pytestmark = pytest.mark.runtime


@pytest.fixture(scope="module")
def workers(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two good workers."""
    folder = tmp_path_factory.mktemp("workers")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with ExitStack() as stack:
        for number, address in enumerate(addresses):
            arguments = ["cluster", "worker", "--bind", address, "--threads", "1"]
            verb = stack.enter_context(running(arguments, folder / f"{number}.txt"))
            until("it runs", lambda verb=verb: "worker at" in verb.text)  # type: ignore[misc]
        yield addresses


def nodes_file(folder: Path, addresses: Sequence[str], memory: str | None = "1G") -> Path:
    """Nodes called a, b, ... at these addresses."""
    path = folder / "nodes.toml"
    tables = [
        f'[[node]]\nname = "{chr(97 + i)}"\naddress = "{address}"\n' + (f'memory = "{memory}"\n' if memory else "")
        for i, address in enumerate(addresses)
    ]
    path.write_text("\n".join(tables))
    return path


def faults(found: Diagnosis) -> dict[str, str]:
    """Faults by node, of those that have some."""
    return {node.name: " ".join(node.faults) for node in found.nodes if node.faults}


@contextmanager
def said_by_side_port(port: int, state: WorkerState) -> Iterator[None]:
    """A side port of the worker at ``port`` that says so."""
    side = SidePort("127.0.0.1", port + 1, port, state)
    try:
        yield
    finally:
        side.close()


def test_good_workers_give_the_numbers_that_are_computed_here(workers: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        command, ["doctor", "--nodes", str(nodes_file(tmp_path, workers)), "--json"], standalone_mode=False
    )
    assert done.return_value == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["healthy"] and found["difference"] <= 1e-3
    assert all(node["state"]["build"] == found["build"] and node["link"]["bandwidth"] > 0 for node in found["nodes"])
    assert found["seconds"] < 60


def test_each_bad_node_is_named_with_its_reason(workers: list[str], runtime: Runtime, tmp_path: Path) -> None:
    nobody, older, built, busy = free_ports(4)
    facts = runtime.facts
    hello = struct.pack("<Q3Bx24s", 28, 6, 2, 0, bytes(24))
    begin = time.monotonic()
    with (
        fake_worker(None) as (silent, _),
        fake_worker(hello) as (bare, _),
        said_by_side_port(older, WorkerState(facts.digest, (6, 2, 0), "running")),
        said_by_side_port(built, WorkerState("0" * 64, facts.rpc_protocol, "running")),
        said_by_side_port(busy, WorkerState(facts.digest, facts.rpc_protocol, "restarting", reason="it crashed")),
    ):
        addresses = [workers[0], f"127.0.0.1:{nobody}", silent, bare]
        addresses += [f"127.0.0.1:{port}" for port in (older, built, busy)]
        found = cluster_doctor(nodes=nodes_file(tmp_path, addresses))
    assert time.monotonic() - begin < 60
    named = faults(found)
    assert sorted(named) == ["b", "c", "d", "e", "f", "g"]
    assert "no RPC worker at" in named["b"] and "Connection refused" in named["b"]
    assert "did not answer within" in named["c"]
    assert "speaks RPC protocol 6.2.0, this runtime 7.0.0" in named["d"]
    assert "speaks RPC protocol 6.2.0, this runtime 7.0.0" in named["e"]
    assert "build 000000000000" in named["f"]
    assert "restarting: it crashed" in named["g"]
    text = report_text(found)
    assert not found.healthy and text.count("FAIL") == 6 and text.splitlines()[0].startswith("ok    a")


def test_nodes_without_memory_are_all_examined_though_one_cannot_be_asked(workers: list[str], tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    file = nodes_file(tmp_path, [f"127.0.0.1:{nobody}", workers[0]], memory=None)
    model = CASES[0].make(tmp_path / "model.gguf")
    for found in (cluster_doctor(nodes=file), cluster_doctor(model, nodes=file, context=512)):
        assert faults(found).keys() == {"a"}
        assert found.nodes[1].worker is not None
    assert cluster_doctor(nodes=nodes_file(tmp_path, workers, memory=None), sample=False).healthy


def test_a_machine_that_takes_no_connection_is_told_from_a_silent_worker() -> None:
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            # What does not fit the queue is dropped, as behind a firewall.
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(RuntimeFault, match="cannot be reached"):
            ask_worker(f"127.0.0.1:{full.getsockname()[1]}", (7, 0, 0), timeout=0.3)


def test_a_worker_with_less_memory_than_stated_is_named(workers: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        command, ["doctor", "--nodes", str(nodes_file(tmp_path, workers, "900000G"))], standalone_mode=False
    )
    assert done.return_value == 1
    assert "the file of nodes states 900000.0 GB" in done.output


def test_a_model_is_compared_with_what_is_free(workers: list[str], tmp_path: Path) -> None:
    model = CASES[0].make(tmp_path / "model.gguf")
    found = cluster_doctor(model, nodes=nodes_file(tmp_path, workers), context=512, sample=False)
    assert found.healthy and found.difference is None


def test_a_worker_that_computes_wrongly_is_blamed(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = doctor_sample.run_sample

    def wrong(model: Path, runtime: Runtime, addresses: Sequence[str] = (), **more: object) -> SampleRun:
        if workers[0] in addresses and len(addresses) > 1:
            raise RuntimeFault(f"decoding: ended\n  | RPC server {workers[0]} crashed, was lost")
        run = right(model, runtime, (), **more)  # type: ignore[arg-type]
        return SampleRun(tuple(turn * 2 for turn in run.turns), run.answer) if addresses else run

    monkeypatch.setattr(doctor_sample, "run_sample", wrong)
    file = nodes_file(tmp_path, workers)
    assert faults(cluster_doctor(nodes=file)).keys() == {"a"}
    found = cluster_doctor(nodes=nodes_file(tmp_path, workers[1:]))
    assert "the sample's log-probabilities differ" in faults(found)["a"]


@pytest.mark.parametrize(("stated", "measured", "noted"), [(125e6, 6e6, 1), (125e6, 110e6, 0), (12.5e9, 400e6, 0)])
def test_a_slow_link_is_noted_as_far_as_links_can_be_measured(stated: float, measured: float, noted: int) -> None:
    report = NodeReport("a", "a:1", link=Link(0.001, measured))
    assert len(_slow(Node("a", "a:1", link=stated), report)) == noted


def test_a_difference_is_the_worse_turns_and_numbers_that_are_none_are_infinite() -> None:
    one = np.log(np.full((3, 80), 1 / 80, np.float32))
    other = one.copy()
    other[:, 0] += 1
    assert difference(SampleRun((one, one), ()), SampleRun((one, one), ())) == 0
    assert 0.9 < difference(SampleRun((one, other), ()), SampleRun((one, one), ())) < 1.1
    one[0, 0] = np.nan
    assert difference(SampleRun((one,), ()), SampleRun((other,), ())) == float("inf")
