"""Text from a loaded model, one token at a time; for demonstrations. Serving is llama-server's work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kimi_gguf.cluster.llama_engine import LlamaEngine, TokenIds


def generate(
    engine: LlamaEngine,
    prompt: TokenIds,
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 0.95,
    seed: int = 0,
    sequence: int = 0,
) -> Iterator[int]:
    """Continue ``prompt`` by up to ``count`` tokens; stops at, and does not yield, a token that ends generation.

    Args:
        prompt: token ids that follow what the sequence holds already.
        temperature: 0 takes the likeliest token each time.
        top_p: only the likeliest tokens that together have this probability are drawn from.
        seed: of the draws; the same seed gives the same text where the numbers are the same.

    Raises:
        as ``LlamaEngine.decode``.
    """
    rng = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = engine.decode(tokens, sequence, outputs="last").logits[0]
        token = _draw(logits.astype(np.float64), temperature, top_p, rng)
        if token in engine.model.end_tokens:
            return
        yield token
        tokens = [token]


def _draw(logits: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < top_p]
    return int(rng.choice(kept, p=probabilities[kept] / probabilities[kept].sum()))
