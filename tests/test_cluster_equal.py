"""The trained tiny model over three workers: the numbers are the local ones, and slots do not disturb each other."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_support import free_ports, running, until
from runtime_support import EXACT, top_difference

import kimi_gguf
from kimi_gguf import convert
from kimi_gguf.cluster.llama_engine import LlamaEngine
from kimi_gguf.cluster.runtime import Runtime

pytestmark = pytest.mark.runtime

FOLDER = Path(kimi_gguf.__file__).parent / "data" / "tiny-k31"
PROMPTS = ("It was a truth", "She had been", "Mr. Darcy said", "The family of")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in float32, whose greedy text does not depend on what else is in a batch."""
    path = tmp_path_factory.mktemp("equal") / "tiny.gguf"
    convert(str(FOLDER), quant="F32", outfile=str(path))
    return path


@pytest.fixture(scope="module")
def workers(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("workers")
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(3))
    with ExitStack() as stack:
        for number, address in enumerate(addresses):
            arguments = ["cluster", "worker", "--bind", address, "--threads", "1"]
            verb = stack.enter_context(running(arguments, folder / f"{number}.txt"))
            until("it runs", lambda verb=verb: "worker at" in verb.text)  # type: ignore[misc]
        yield addresses


def test_logits_over_three_workers_are_the_local_ones(model: Path, workers: tuple[str, ...], runtime: Runtime) -> None:
    ids = list(range(300, 420))
    options = replace(EXACT, n_ctx=512)
    with LlamaEngine(model, options, runtime=runtime) as engine:
        local = engine.decode(ids).logits
    with LlamaEngine(model, replace(options, rpc=workers, tensor_split=(2.0, 2.0, 2.0)), runtime=runtime) as engine:
        remote = engine.decode(ids).logits
        log = engine.said()
    assert all(f"RPC{number}" in log for number in range(3))
    assert top_difference(remote, local).max() <= 1e-4


def test_two_conversations_at_once_are_what_they_are_alone(
    model: Path, workers: tuple[str, ...], tmp_path: Path
) -> None:
    (port,) = free_ports(1)

    def complete(prompt: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return str(answer["content"])

    def two_turns(prompt: str) -> tuple[str, str]:
        first = complete(prompt)
        return first, complete(f"{prompt}{first} And so")

    arguments = ["serve", str(model), "--rpc", ",".join(workers), "--port", str(port), "--parallel", "2"]
    arguments += ["--threads", "1", "--context", "512", "--log", str(tmp_path / "serve.log")]
    with running(arguments, tmp_path / "serve.txt") as verb:
        until("it is ready", lambda: "ready after" in verb.text)
        alone = [two_turns(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(two_turns, PROMPTS * 2)) == alone * 2
