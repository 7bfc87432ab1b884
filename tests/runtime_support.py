"""What the runtime's tests share: running a model in llama.cpp and in the reference, comparing, RPC workers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kimi_gguf.cluster.llama_engine import Decoded, EngineOptions, LlamaEngine
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.attn_res import Stream
from kimi_gguf.reference.gguf_store import GgufStore
from kimi_gguf.reference.layer import Trace
from kimi_gguf.reference.model import logits
from kimi_gguf.reference.options import Options, preset
from kimi_gguf.reference.weights import WeightStore

F64Array = npt.NDArray[np.float64]

EXACT = EngineOptions(n_ctx=1024, threads=1, cache_type="f32", flash_attn="off")
"""Nothing is rounded but what the weights' own type asks for. One thread: barriers cost more than tiny models."""

TOP = 64
DATA = Path(__file__).parent / "data"


def log_probs(values: npt.NDArray[np.floating]) -> F64Array:
    """Natural log-probabilities of logits [..., vocabulary]."""
    x = values.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def top_difference(ours: npt.NDArray[np.floating], theirs: npt.NDArray[np.floating]) -> F64Array:
    """Per position the largest difference of log-probability over the 64 likeliest tokens of ``theirs``."""
    a, b = log_probs(ours), log_probs(theirs)
    top = np.argsort(-b, axis=-1)[:, :TOP]
    return np.abs(np.take_along_axis(a, top, 1) - np.take_along_axis(b, top, 1)).max(axis=1)


def divergence(ours: npt.NDArray[np.floating], theirs: npt.NDArray[np.floating]) -> F64Array:
    """Per position KL(theirs || ours) in nats."""
    a, b = log_probs(ours), log_probs(theirs)
    return (np.exp(b) * (b - a)).sum(axis=-1)


@dataclass(frozen=True)
class ReferenceRun:
    """The float32 reference on one sequence: logits [n, V], and per layer experts [n, used] and selected positions."""

    logits: npt.NDArray[np.float32]
    experts: dict[int, npt.NDArray[np.int64]]
    selections: dict[int, list[npt.NDArray[np.int64]]]


def run_reference(store: WeightStore, ids: Sequence[int], options: Options | None = None) -> ReferenceRun:
    """Run the reference in llama.cpp's conventions (or in ``options``)."""
    if options is None:
        options = preset("llama.cpp")
        if isinstance(store, GgufStore):
            options = replace(options, indexer_eps=store.indexer_eps)
    experts: dict[int, npt.NDArray[np.int64]] = {}
    selections: dict[int, list[npt.NDArray[np.int64]]] = {}

    def observe(index: int, stream: Stream, trace: Trace) -> None:
        if trace.routing is not None:
            experts[index] = trace.routing.ids[0].numpy()
        if trace.selection is not None and trace.index_scores is not None:
            selections[index] = [row.nonzero()[:, 0].numpy() for row in trace.selection[0]]

    with torch.no_grad():
        values = logits(store, torch.tensor([list(ids)]), options, observe=observe)[0].numpy()
    return ReferenceRun(values, experts, selections)


def run_engine(
    model: Path, ids: Sequence[int], runtime: Runtime, options: EngineOptions = EXACT, *, trace: bool = True
) -> Decoded:
    """Run a whole sequence in llama.cpp, with experts and selections unless ``trace`` is False."""
    with LlamaEngine(model, options, runtime=runtime) as engine:
        return engine.decode(ids, trace=("experts", "selections") if trace else ())


def choices_differ(ours: Decoded | ReferenceRun, theirs: Decoded | ReferenceRun) -> npt.NDArray[np.bool_]:
    """Positions where any layer chose other experts or other keys."""
    different = np.zeros(len(theirs.logits), dtype=bool)
    for layer, chosen in theirs.experts.items():
        different |= (np.sort(ours.experts[layer], 1) != np.sort(chosen, 1)).any(axis=1)
    for layer, rows in theirs.selections.items():
        pairs = zip(ours.selections[layer], rows, strict=True)
        different |= np.array([not np.array_equal(a, b) for a, b in pairs])
    return different


def check_close(
    ours: Decoded | ReferenceRun, theirs: Decoded | ReferenceRun, limit: float, *, ties: float = 0.01
) -> None:
    """Assert agreement within ``limit`` at every position but near-ties.

    Another order of additions may decide a choice between equal scores the other way, on some processor; such a
    position may differ, and at most a share of ``ties`` of the positions may be such.
    """
    difference = top_difference(ours.logits, theirs.logits)
    flipped = choices_differ(ours, theirs)
    assert flipped.mean() <= ties, f"{flipped.sum()} of {len(flipped)} positions chose otherwise"
    rest = difference[~flipped]
    # A flipped choice also touches positions that look back at it, but hardly.
    assert np.quantile(rest, 1 - ties) <= limit, f"difference {np.quantile(rest, 1 - ties)}, limit {limit}"
    if not flipped.any():
        assert rest.max() <= limit, f"difference {rest.max()} at position {rest.argmax()}, limit {limit}"


@contextmanager
def rpc_workers(runtime: Runtime, count: int, log: Path) -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    """Workers on free ports of the loopback interface: (endpoint, process) of each."""
    workers = []
    try:
        with log.open("wb") as output:
            for _ in range(count):
                port = free_port()
                command = [str(runtime.program("ggml-rpc-server")), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                process = subprocess.Popen(command, stdout=output, stderr=output)
                workers.append((f"127.0.0.1:{port}", process))
        for endpoint, process in workers:
            wait_for_port(endpoint, process)
        yield workers
    finally:
        for _, process in workers:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """Return once somebody accepts connections at ``endpoint``."""
    host, _, port = endpoint.partition(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the worker at {endpoint} ended with {process.returncode}"
        try:
            with socket.create_connection((host, int(port)), 1):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"nobody listens at {endpoint}")
