"""A report made of invented observations: four layers, three of them with experts, one much the worst."""

from __future__ import annotations

import numpy as np

from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.observations import FullLogits, LayerObservation, ModelIdentity, TokenSet
from kimi_gguf.verify.result import EvalReport

LAYERS, EXPERTS, USED, VOCAB, CONTEXT, CHUNKS = 4, 24, 4, 50, 20, 10
WORST = 2
NOISE = {0: 0.02, 1: 0.05, WORST: 1.5, 3: 0.2}


def identity(label: str) -> ModelIdentity:
    return ModelIdentity(
        label=label,
        arch="kimi-k31",
        digest="0" * 64,
        layers=LAYERS,
        experts=EXPERTS,
        used=USED,
        moe_layers=(1, 2, 3),
        layer_kinds=("kda", "kda", "mla", "mla"),
        indexer_top_k=None,
        recipe="Q4_K_M",
    )


def make_report(label: str = "model.gguf", *, noise: float = 1.0, flags: tuple[str, ...] = ()) -> EvalReport:
    """A comparison whose differences grow with ``noise``; none at 0."""
    random = np.random.default_rng(5)
    tokens = TokenSet(
        ids=random.integers(0, VOCAB, CONTEXT * CHUNKS).astype(np.int32),
        context=CONTEXT,
        vocab_size=VOCAB,
        text_name="text.txt",
        text_sha256="1" * 64,
        vocab_sha256="2" * 64,
    )
    base, model = identity("checkpoint"), identity(label)
    comparison = Comparison(tokens, base, model)
    for place in tokens.places():
        for layer in range(LAYERS):
            seen = _observations(random, noise * NOISE[layer], routed=layer in base.moe_layers)
            comparison.layer(place, layer, *seen)
        logits = random.normal(size=(CONTEXT - 1, VOCAB)).astype(np.float32)
        moved = logits + noise * 0.1 * random.normal(size=logits.shape).astype(np.float32)
        comparison.output(place, FullLogits(logits), FullLogits(moved))
    return EvalReport(
        engine="stream",
        model=model,
        baseline=base,
        baseline_kind="live",
        text_name=tokens.text_name,
        text_sha256=tokens.text_sha256,
        context=CONTEXT,
        chunks=CHUNKS,
        tokens=tokens.tokens,
        scored=comparison.scored,
        teacher_forced=False,
        routing=comparison.routing(),
        divergence=comparison.divergence(),
        layers=comparison.layers(),
        output=comparison.output_result(),
        seconds=1.0,
        missing={"indexer_overlap": "the model has no indexer"},
        flags=flags,
    )


def _observations(random: np.random.Generator, noise: float, *, routed: bool) -> list[LayerObservation]:
    """What a layer did in the baseline, and in a model that is off by ``noise``."""
    scores = random.normal(size=(CONTEXT, EXPERTS))
    hidden = random.normal(size=(CONTEXT, 16)).astype(np.float32)
    seen = []
    for scale in (0.0, noise):
        moved = scores + scale * random.normal(size=scores.shape)
        state = (hidden + scale * random.normal(size=hidden.shape)).astype(np.float32)
        if not routed:
            seen.append(LayerObservation(hidden=state))
            continue
        ids = np.argsort(-moved, axis=1)[:, :USED].astype(np.int32)
        probs = (1 / (1 + np.exp(-moved))).astype(np.float32)
        weights = np.take_along_axis(probs, ids, axis=1)
        seen.append(LayerObservation(expert_ids=ids, expert_weights=weights, router_probs=probs, hidden=state))
    return seen
