"""What the tests of evaluation share: a small checkpoint, a text, and sets of tokens made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.verify.observations import ModelIdentity, TokenSet

SHAPE = TinyShape(layers=5, experts=12, used=3, index_topk=16, vision=False)
CONTEXT = 48


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A random checkpoint of K3.1 and a text, in ``folder``."""
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n * 7} is {n * n * 7}; Zebra, Ωmega and 你好。\n" for n in range(60)))
    return make_checkpoint(folder / "Tiny-K3.1", SHAPE, seed=7), text


def token_set(count: int, context: int, vocab: int = 64) -> TokenSet:
    """Random ids."""
    ids = np.random.default_rng(count).integers(0, vocab, count).astype(np.int32)
    return TokenSet(ids, context, vocab, "text.txt", "t" * 64, "v" * 64)


def identity(layers: int = 3, experts: int = 8, used: int = 2, top_k: int | None = None) -> ModelIdentity:
    """A model of KDA layers, the first of them dense."""
    moe = tuple(range(1, layers))
    return ModelIdentity("tiny", "kimi-k31", "d" * 64, layers, experts, used, moe, ("kda",) * layers, top_k)
