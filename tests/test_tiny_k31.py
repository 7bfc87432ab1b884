"""The trained model that ships with the package: it has learned, in every part."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import kimi_gguf
from convert.vocab import load_vocab
from kimi_gguf.reference import tokenizer
from kimi_gguf.reference.attn_res import Stream
from kimi_gguf.reference.checkpoint_store import CheckpointStore, open_checkpoint
from kimi_gguf.reference.layer import Trace
from kimi_gguf.reference.model import logits
from kimi_gguf.reference.options import Options

FOLDER = Path(kimi_gguf.__file__).parent / "data" / "tiny-k31"
WINDOWS = 8
MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> CheckpointStore:
    return open_checkpoint(FOLDER)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "figures.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def ids() -> Tensor:
    encoding = tokenizer.encoding((FOLDER / "tiktoken.model").read_bytes())
    return torch.tensor(encoding.encode_ordinary((FOLDER / "heldout.txt").read_text()))


@pytest.fixture(scope="module")
def windows(ids: Tensor, store: CheckpointStore) -> Tensor:
    context = store.config.context_length
    return torch.stack([ids[i * context : (i + 1) * context + 1] for i in range(WINDOWS)])


class Measured:
    """Losses of each window's tokens, their mean, and tokens per expert of each layer."""

    def __init__(self, store: CheckpointStore, windows: Tensor, options: Options) -> None:
        self.loads: dict[int, Tensor] = {}
        self.token_losses: list[Tensor] = []
        with torch.inference_mode():
            for window in windows.split(1):
                output = logits(store, window[:, :-1], options, observe=self.observe)
                self.token_losses.append(functional.cross_entropy(output[0], window[0, 1:], reduction="none"))
        self.losses = [float(losses.mean()) for losses in self.token_losses]

    def observe(self, layer: int, _stream: Stream, trace: Trace) -> None:
        if trace.routing is not None:
            load = torch.bincount(trace.routing.ids.flatten(), minlength=16)
            self.loads[layer] = self.loads.get(layer, torch.zeros_like(load)) + load


@pytest.fixture(scope="module")
def measured(store: CheckpointStore, windows: Tensor) -> Measured:
    return Measured(store, windows, Options(kda_form="centred"))


def test_its_perplexity_is_below_half_of_a_bigram_model_s(measured: Measured, figures: dict[str, Any]) -> None:
    bigram = figures["bigram_window_losses"][:WINDOWS]
    assert math.exp(sum(measured.losses) / WINDOWS) < math.exp(sum(bigram) / WINDOWS) / 2
    assert figures["perplexity"] < figures["bigram_perplexity"] / 2


def test_the_recorded_losses_are_those_of_this_checkpoint(measured: Measured, figures: dict[str, Any]) -> None:
    assert measured.losses == pytest.approx(figures["window_losses"][:WINDOWS], abs=2e-3)


def test_every_expert_is_used(measured: Measured, figures: dict[str, Any]) -> None:
    assert sorted(measured.loads) == [1, 2, 3, 4]
    assert all(int(load.min()) > 0 for load in measured.loads.values())
    assert all(min(load) > 0 for load in figures["expert_use"].values())


def test_the_indexer_changes_the_loss(store: CheckpointStore, windows: Tensor, measured: Measured) -> None:
    dense = Measured(store, windows[:2], Options(kda_form="centred", sparse=False))
    top_k = store.config.dsa.top_k if store.config.dsa else 0
    for one, other in zip(measured.token_losses[:2], dense.token_losses, strict=True):
        change = (one - other).abs()
        assert float(change[:top_k].max()) < 1e-4
        assert float(change[top_k:].mean()) > 3e-4


def test_what_the_indexer_learned_is_better_than_random_keys(figures: dict[str, Any]) -> None:
    learned = abs(figures["perplexity"] - figures["perplexity_without_indexer"])
    blind = figures["perplexity_with_random_indexer"] - figures["perplexity_without_indexer"]
    assert blind > 5 * learned


def test_the_held_out_text_is_whole_and_long_enough(ids: Tensor, figures: dict[str, Any]) -> None:
    text = (FOLDER / "heldout.txt").read_bytes()
    assert len(text) >= 64 << 10
    assert hashlib.sha256(text).hexdigest() == figures["held_out_sha256"]
    assert len(ids) == figures["held_out_tokens"]


def test_the_vocabulary_gives_back_the_text_and_every_rank_is_one_merge(store: CheckpointStore, ids: Tensor) -> None:
    model = (FOLDER / "tiktoken.model").read_bytes()
    encoding = tokenizer.encoding(model)
    assert encoding.decode(ids.tolist()) == (FOLDER / "heldout.txt").read_text()
    vocab = load_vocab(store.source, store.config)
    assert len(vocab.tokens) == store.config.vocab_size
    assert len(vocab.merges) == len(tokenizer.parse_ranks(model)) - 256


def test_it_is_small_enough_to_ship() -> None:
    sizes = [file.stat().st_size for file in FOLDER.iterdir()]
    assert max(sizes) <= 5 * MIB
    assert sum(sizes) <= 20 * MIB


def test_the_card_names_source_license_and_figures(figures: dict[str, Any]) -> None:
    card = (FOLDER / "CARD.md").read_text()
    for fact in ("r-cran-janeaustenr", "public domain", "MIT", f"{figures['perplexity']:.2f}", "heldout.txt"):
        assert fact in card
