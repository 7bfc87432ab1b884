"""What engines tell and measures read: the contract between whoever runs a model and whoever compares runs.

An engine runs a model over a ``TokenSet`` and hands what it sees to a ``Sink`` piece by piece, in any order: the
stream engine goes layer by layer over all chunks, llama.cpp chunk by chunk through all layers. A ``Place`` says which
tokens a piece is about. ``comparison.Comparison`` takes pieces of two models in pairs; ``trace.TraceWriter`` is a sink.
Everything here is numpy; nothing knows torch, llama.cpp or files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from quant.errors import UsageError

I32Array = npt.NDArray[np.int32]
F32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

EngineName = Literal["stream", "llama"]

DEFAULT_CONTEXT = 512
"""Tokens of a chunk when nothing else is asked."""


@dataclass(frozen=True, slots=True)
class Place:
    """Positions [begin, end) of one chunk."""

    chunk: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Text as token ids, cut into chunks that are independent sequences.

    Attributes:
        ids: I32 [N]; chunk c is ``ids[c * context : (c + 1) * context]``, the last may be shorter (2 ids at least).
        context: tokens per chunk.
        vocab_size: rows of the output matrix.
        text_name: name of the text's file, without folders.
        text_sha256: of the whole text's bytes.
        vocab_sha256: of the token strings in id order (``text.vocab_digest``).
    """

    ids: I32Array
    context: int
    vocab_size: int
    text_name: str
    text_sha256: str
    vocab_sha256: str

    def __post_init__(self) -> None:
        if self.context < 2 or len(self.ids) < 2:
            raise UsageError(f"{len(self.ids)} tokens in chunks of {self.context}: at least 2 of each are needed")

    @property
    def chunks(self) -> int:
        """Number of chunks; a last one of a single token does not count, it predicts nothing."""
        whole, rest = divmod(len(self.ids), self.context)
        return whole + (rest >= 2)

    @property
    def tokens(self) -> int:
        """Tokens in all chunks."""
        return min(len(self.ids), self.chunks * self.context)

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return min(self.context, self.tokens)

    def place(self, chunk: int) -> Place:
        """All positions of a chunk."""
        return Place(chunk, 0, min(self.context, self.tokens - chunk * self.context))

    def places(self) -> Iterator[Place]:
        """All chunks, whole, in order."""
        return (self.place(chunk) for chunk in range(self.chunks))

    def chunk_ids(self, chunk: int) -> I32Array:
        """Token ids of a chunk, I32 [T]."""
        begin = chunk * self.context
        return self.ids[begin : min(begin + self.context, self.tokens)]

    def index(self, place: Place) -> slice:
        """Where a place lies in arrays over all tokens."""
        begin = place.chunk * self.context
        return slice(begin + place.begin, begin + place.end)

    def targets(self, place: Place) -> I32Array:
        """The next token of each position that has one, I32 [n]; n is one less where the place ends its chunk."""
        ids = self.chunk_ids(place.chunk)
        return ids[place.begin + 1 : place.end + 1]

    @property
    def digest(self) -> str:
        """SHA-256 over ids and context: two runs with the same digest saw the same sequences."""
        text = hashlib.sha256(np.ascontiguousarray(self.ids[: self.tokens], dtype="<i4").tobytes())
        text.update(f"{self.context} {self.vocab_size}".encode())
        return text.hexdigest()


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model a run was about.

    Attributes:
        label: for people: name of the file or folder.
        arch: GGUF architecture.
        digest: SHA-256 that changes when the weights may have changed (headers, sizes, times).
        layers, experts, used: decoder layers, routed experts per layer, experts per token.
        moe_layers: 0-based layers with a router.
        indexer_top_k: keys that an indexer keeps; None without indexers.
        recipe: what the file says of its types, for example ``Q4_K_M``; None for a checkpoint.
    """

    label: str
    arch: str
    digest: str
    layers: int
    experts: int
    used: int
    moe_layers: tuple[int, ...]
    layer_kinds: tuple[str, ...]
    indexer_top_k: int | None
    recipe: str | None = None


@dataclass(frozen=True, slots=True)
class LayerObservation:
    """What one layer did to n tokens; a field is None where the layer has no such part or the engine cannot see it.

    Attributes:
        expert_ids: I32 [n, used], the chosen experts; in any order.
        expert_weights: F32 [n, used], their weights as applied, in the order of ``expert_ids``.
        router_probs: F32 [n, E], the router's scores before the selection bias (sigmoid or softmax), not normalised.
        selected: bool [n, S], keys that the indexer let through (S counts from the chunk's start; S >= last position).
        hidden: F32 [n, d], the running residual after the layer.
    """

    expert_ids: I32Array | None = None
    expert_weights: F32Array | None = None
    router_probs: F32Array | None = None
    selected: BoolArray | None = None
    hidden: F32Array | None = None


@dataclass(frozen=True, slots=True)
class FullLogits:
    """Next-token logits F32 [n, V], not normalised."""

    values: F32Array


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """What a trace keeps of the output of n positions.

    Attributes:
        ids: I32 [n, K], the K likeliest tokens; log_probs: F32 [n, K].
        tail: F32 [n], probability of all other tokens together.
        target: F32 [n], log-probability of the true next token.
        sample_ids: I32 [n, S], tokens drawn from the others by their probability; sample_log_probs: F32 [n, S].
        best: I32 [n], the likeliest token.
    """

    ids: I32Array
    log_probs: F32Array
    tail: F32Array
    target: F32Array
    sample_ids: I32Array
    sample_log_probs: F32Array

    @property
    def best(self) -> I32Array:
        best: I32Array = np.take_along_axis(self.ids, self.log_probs.argmax(axis=1)[:, None], axis=1)[:, 0]
        return best


OutputObservation = FullLogits | TopLogProbs


class Sink(Protocol):
    """Where an engine puts what it sees of one model."""

    def layer(self, place: Place, layer: int, seen: LayerObservation) -> None:
        """What ``layer`` did to the tokens of ``place``."""
        ...

    def output(self, place: Place, seen: FullLogits) -> None:
        """Logits of the positions of ``place`` that have a next token, one row for each of ``targets(place)``."""
        ...


class PairSink(Protocol):
    """Where an engine, or a trace replayed beside one, puts what it sees of BASE and MODEL at the same place."""

    def layer(self, place: Place, layer: int, base: LayerObservation, model: LayerObservation) -> None: ...

    def output(self, place: Place, base: OutputObservation, model: FullLogits) -> None: ...


class Progress(Protocol):
    """Follows a long run; ``console`` has the bars."""

    def begin(self, stage: str, total: int) -> None:
        """A stage of ``total`` steps starts, for example ``layers``."""
        ...

    def step(self, done: int, text: str) -> None:
        """``done`` steps of the stage are done; ``text`` says what was done last."""
        ...


class NoProgress:
    """Follows nothing."""

    def begin(self, stage: str, total: int) -> None: ...

    def step(self, done: int, text: str) -> None: ...


JsonDict = dict[str, Any]
