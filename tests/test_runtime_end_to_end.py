"""Checkpoint, convert, patched runtime: log-probabilities against the float32 reference on the checkpoint itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_support import check_close, run_engine, run_reference

from kimi_gguf import convert
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.reference.options import preset
from kimi_gguf.reference.stores import open_store

pytestmark = pytest.mark.runtime

LENGTH = 620
SHAPE = TinyShape(
    hidden=128,
    vocab=640,
    context=1024,
    kda_heads=4,
    kda_head_dim=64,
    heads=4,
    q_lora=64,
    kv_lora=64,
    nope=32,
    rope=16,
    v=32,
    ffn_dense=256,
    expert_width=64,
    latent=64,
    index_head_dim=32,
    vision=False,
)
SHAPES = {
    "K3": replace(SHAPE, k31=False),
    "K3.1 top 8": replace(SHAPE, index_topk=8),
    "K3.1 top 64": replace(SHAPE, index_topk=64),
    "K3.1 top 2048": replace(SHAPE, index_topk=2048),
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_a_converted_checkpoint_has_the_references_log_probs(
    name: str, seed: int, runtime: Runtime, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", SHAPES[name], seed=seed)
    model = tmp_path / "model.gguf"
    convert(str(checkpoint), quant="F32", outfile=str(model))
    ids = np.random.default_rng(seed).integers(0, SHAPE.ranks, LENGTH).tolist()

    engine = run_engine(model, ids, runtime)
    reference = run_reference(open_store(checkpoint), ids, preset("llama.cpp"))

    assert sorted(engine.selections) == ([3, 4] if "K3.1" in name else [])
    assert sorted(engine.experts) == [1, 2, 3, 4]
    check_close(engine, reference, 2e-3)
