"""The doctor's sample: a small K3.1 with the released head counts, run over workers and here, and compared.

Each worker gets one KDA and one MLA layer with an indexer; the last one also the output. The weights are random, so
only numbers are compared: two turns of a conversation, the second continuing the caches and states of the first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.config import parse_config
from convert.model_config import ModelConfig
from kimi_gguf.cache import cache_folder
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.llama_engine import EngineOptions, LlamaEngine
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config
from kimi_gguf.reference.gguf_maker import byte_text, make_gguf
from quant.tensors import F32Array
from quant.types import QuantType

_SEED = 31
_TURNS = (96, 48)
_ANSWER = 6
_TOP = 64
# Quantized products differ between processors and GPUs; a wrong operation is off by whole nats.
_LIMIT = 0.1
_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class SampleRun:
    """What the sample gave: logits of each turn F32 [tokens, vocabulary], and the tokens that it answered."""

    turns: tuple[F32Array, ...]
    answer: tuple[int, ...]


def sample_model(workers: int) -> Path:
    """The sample for so many workers, made once and kept in the cache folder."""
    config = _config(2 * workers)
    digest = hashlib.sha256(f"{config!r} {_SEED}".encode()).hexdigest()[:12]
    path = cache_folder() / "doctor" / f"sample-{workers}-{digest}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            make_gguf(partial, config, seed=_SEED, qtype=QuantType.Q8_0)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def run_sample(
    model: Path, runtime: Runtime, workers: Sequence[str] = (), *, answer: Sequence[int] | None = None
) -> SampleRun:
    """Run two turns here, or over ``workers``.

    Args:
        answer: the tokens between the turns, so that two runs see the same; the likeliest ones by default.

    Raises:
        RuntimeFault: a worker or the engine fails, or does not answer within 15 s.
    """
    split = (*(2.0 for _ in workers[1:]), 3.0) if workers else ()
    options = EngineOptions(
        n_ctx=512,
        # More would wait for each other longer than they compute.
        threads=1,
        rpc=tuple(workers),
        tensor_split=split,
        gpu_layers=999 if workers else 0,
        load_timeout=_SECONDS,
        timeout=_SECONDS,
        check_structure=False,
    )
    first, second = (list(byte_text(length, _SEED + length).encode()) for length in _TURNS)
    with LlamaEngine(model, options, runtime=runtime) as engine:
        logits = engine.decode(first).logits
        turns, said = [logits], []
        for number in range(_ANSWER):
            token = int(turns[-1][-1].argmax()) if answer is None else answer[number]
            said.append(token)
            turns.append(engine.decode([token]).logits)
        turns.append(engine.decode(second).logits)
    return SampleRun((turns[0], np.concatenate(turns[1:])), tuple(said))


def difference(ours: SampleRun, theirs: SampleRun) -> float:
    """Median over positions of the largest difference in log-probability among the 64 likeliest tokens, worse turn.

    Infinite where a number is none.
    """
    worst = 0.0
    for a, b in zip(ours.turns, theirs.turns, strict=True):
        if not np.isfinite(a).all():
            return float("inf")
        p, q = _log_probs(a), _log_probs(b)
        top = np.argsort(-q, axis=-1)[:, :_TOP]
        gap = np.abs(np.take_along_axis(p, top, 1) - np.take_along_axis(q, top, 1)).max(axis=1)
        worst = max(worst, float(np.median(gap)))
    return worst


def compare(model: Path, runtime: Runtime, workers: Sequence[str], local: SampleRun) -> float:
    """``difference`` of a run over ``workers`` from one here.

    Raises:
        RuntimeFault: as ``run_sample``, or the numbers are other ones.
    """
    found = difference(run_sample(model, runtime, workers, answer=local.answer), local)
    if found > _LIMIT:
        raise RuntimeFault(
            f"the sample's log-probabilities differ from those here by {found:.3g}, at most {_LIMIT:g} is expected",
            "a backend there computes an operation wrongly; try a CPU worker: --device CPU",
        )
    return found


def _config(layers: int) -> ModelConfig:
    shape = TinyShape(
        layers=layers,
        layer_kinds=("kda", "mla") * (layers // 2),
        vocab=512,
        context=1024,
        kda_heads=96,
        heads=96,
        q_lora=64,
        kv_lora=512,
        ffn_dense=256,
        experts=16,
        shared=1,
        expert_width=64,
        latent=64,
        index_heads=32,
        index_head_dim=128,
        index_topk=64,
    )
    return parse_config(json.dumps(checkpoint_config(shape)).encode())


def _log_probs(values: F32Array) -> np.ndarray:
    x = values.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
