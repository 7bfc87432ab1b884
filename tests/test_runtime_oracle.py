"""Ours against upstream's own kimi-k31 (llama.cpp b12211): the frozen answers of eight models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runtime_support import DATA, check_close, log_probs, run_engine, run_reference

from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.gguf_store import GgufStore
from kimi_gguf.reference.oracle import CASES, PROMPT_TOKENS, Answer, OracleCase, load_answer, model_digest

# Float32 sums in another order; 3.5e-5 at most is what they make.
LIMIT = 5e-4


def largest_difference(logits: np.ndarray, answer: Answer) -> float:
    """Over the rows that upstream answered."""
    ours = log_probs(logits[PROMPT_TOKENS - 1 :])
    return float(np.abs(np.take_along_axis(ours, answer.ids, 1) - answer.log_probs).max())


@pytest.mark.runtime
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_runtime_and_reference_give_upstreams_log_probs(case: OracleCase, runtime: Runtime, tmp_path: Path) -> None:
    answer = load_answer(DATA / "oracle", case)
    model = case.make(tmp_path / "model.gguf")
    assert model_digest(model) == answer.model, "the model is not the one that upstream ran"
    ids = [*case.prompt.encode(), *answer.tokens[:-1].tolist()]

    engine = run_engine(model, ids, runtime)
    reference = run_reference(GgufStore(model), ids)

    assert largest_difference(engine.logits, answer) <= LIMIT
    assert largest_difference(reference.logits, answer) <= LIMIT
    assert engine.logits[PROMPT_TOKENS - 1 :].argmax(axis=1).tolist() == answer.tokens.tolist()
    check_close(engine, reference, 2e-3)


def test_the_cases_cover_what_upstream_can_do() -> None:
    shapes = [case.config for case in CASES]
    assert {config.arch for config in shapes} == {"kimi-k3", "kimi-k31"}
    assert {config.dsa.top_k for config in shapes if config.dsa} >= {8, 64, 2048}
    assert any(case.indexer_layers for case in CASES)
    assert any(case.layer_norm_epsilon for case in CASES)
