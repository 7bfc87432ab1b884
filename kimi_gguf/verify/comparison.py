"""Takes observations of two models in pairs, in any order, and keeps what the report needs; memory is independent
of how long the observations are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kimi_gguf.verify import measures
from kimi_gguf.verify.estimates import (
    estimate,
    estimate_tokens,
    histogram,
    kl_quantiles,
    load,
    transformed,
)
from kimi_gguf.verify.observations import (
    FullLogits,
    LayerObservation,
    ModelIdentity,
    OutputObservation,
    Place,
    TokenSet,
    TopLogProbs,
)
from kimi_gguf.verify.result import (
    Divergence,
    Estimate,
    LayerResult,
    OutputResult,
    RoutingResult,
)
from quant.errors import InputError

Array = npt.NDArray[Any]
_OUTPUT_SLICE = 16
_SLOTS = {name: slot for slot, name in enumerate(measures.LAYER)}
_OUTPUT_SLOTS = {name: slot for slot, name in enumerate(measures.OUTPUT)}


class Comparison:
    """A ``PairSink`` that measures; give every place exactly once per layer, and call the results at the end.

    Args:
        tokens: what both models ran on.
        base, model: which models.

    Raises:
        InputError: the two are not variants of one model.
    """

    def __init__(self, tokens: TokenSet, base: ModelIdentity, model: ModelIdentity) -> None:
        check_same_model(base, model)
        self.tokens = tokens
        self.base = base
        self.model = model
        shape = (model.layers, tokens.chunks, len(measures.LAYER))
        n, per_token = tokens.tokens, len(measures.ROUTING)
        self._state: dict[str, Array] = {
            "sums": np.zeros(shape),
            "squares": np.zeros(shape),
            "counts": np.zeros(shape, dtype=np.int64),
            "base_load": np.zeros((model.layers, model.experts), dtype=np.int64),
            "model_load": np.zeros((model.layers, model.experts), dtype=np.int64),
            # First layer of another expert set; the number of layers where there is none.
            "first": np.full(n, model.layers, dtype=np.int32),
            "routed": np.zeros(n, dtype=bool),
            "token_sums": np.zeros((n, per_token)),
            "token_counts": np.zeros((n, per_token), dtype=np.int32),
            "output": np.full((n, len(measures.OUTPUT)), np.nan),
            "from_trace": np.zeros(1, dtype=bool),
        }

    def snapshot(self) -> dict[str, Array]:
        """Everything measured so far; ``restore`` puts it back."""
        return self._state

    def restore(self, state: Mapping[str, Array]) -> None:
        """Continue from a snapshot of a comparison of the same models and tokens.

        Raises:
            InputError: it is of another comparison.
        """
        for name, mine in self._state.items():
            saved = state.get(name)
            if saved is None or saved.shape != mine.shape or saved.dtype != mine.dtype:
                raise InputError(
                    f"the saved state does not fit this run: {name} differs", "start anew without --resume"
                )
        self._state = {name: np.array(state[name]) for name in self._state}

    def layer(self, place: Place, layer: int, base: LayerObservation, model: LayerObservation) -> None:
        """Measure one layer at one place."""
        for seen, identity in ((base, self.base), (model, self.model)):
            check_layer_finite(seen, identity.label, layer, place.chunk)
        state, where = self._state, self.tokens.index(place)
        found = measures.layer_measures(base, model, place.begin, self.model.indexer_top_k)
        for name, values in found.items():
            slot, known = _SLOTS[name], values[~np.isnan(values)]
            state["sums"][layer, place.chunk, slot] += known.sum()
            state["squares"][layer, place.chunk, slot] += np.square(known).sum()
            state["counts"][layer, place.chunk, slot] += len(known)
            if name in measures.ROUTING:
                state["token_sums"][where, slot] += values
                state["token_counts"][where, slot] += 1
        if "exact" in found:
            first = state["first"][where]
            diverged = (found["exact"] == 0) & (first > layer)
            state["first"][where] = np.where(diverged, layer, first)
            state["routed"][where] = True
        for name, seen in (("base_load", base), ("model_load", model)):
            if seen.expert_ids is not None:
                state[name][layer] += np.bincount(seen.expert_ids.reshape(-1), minlength=self.model.experts)

    def output(self, place: Place, base: OutputObservation, model: FullLogits) -> None:
        """Measure the output of the positions of one place that have a next token.

        Raises:
            InputError: logits that are NaN or infinite.
        """
        targets = self.tokens.targets(place)
        begin = self.tokens.index(place).start
        self._state["from_trace"][0] = isinstance(base, TopLogProbs)
        # Slices, because the arithmetic is float64 over the whole vocabulary.
        for at in range(0, len(targets), _OUTPUT_SLICE):
            part = slice(at, min(at + _OUTPUT_SLICE, len(targets)))
            check_finite(model.values[part], self.model.label, place.chunk)
            if isinstance(base, FullLogits):
                check_finite(base.values[part], self.base.label, place.chunk)
                sliced: OutputObservation = FullLogits(base.values[part])
            else:
                sliced = TopLogProbs(*(getattr(base, field.name)[part] for field in fields(base)))
            found = measures.output_measures(sliced, FullLogits(model.values[part]), targets[part])
            for name, values in found.items():
                self._state["output"][begin + at : begin + at + len(values), _OUTPUT_SLOTS[name]] = values

    @property
    def scored(self) -> int:
        """Positions whose output was measured."""
        return int((~np.isnan(self._state["output"][:, 0])).sum())

    def routing(self) -> RoutingResult | None:
        """Routing over all layers: per token the mean over its layers, then over tokens."""
        sums, counts = self._state["token_sums"], self._state["token_counts"]
        with np.errstate(invalid="ignore"):
            means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return _routing_result(lambda slot: estimate_tokens(means[:, slot], self._chunk_of(), self.tokens.chunks))

    def divergence(self) -> Divergence | None:
        """Where tokens first reach another set of experts; None when no routing was seen."""
        first = self._state["first"][self._state["routed"]]
        if not len(first):
            return None
        counts = np.bincount(first, minlength=self.model.layers + 1)
        diverged = first[first < self.model.layers]
        mean = float(diverged.mean()) if len(diverged) else None
        return Divergence(tuple(int(c) for c in counts[:-1]), int(counts[-1]), mean)

    def layers(self) -> tuple[LayerResult, ...]:
        """Every layer of the model."""
        return tuple(self._layer_result(layer) for layer in range(self.model.layers))

    def _layer_result(self, layer: int) -> LayerResult:
        def of(slot: int) -> Estimate | None:
            state = self._state
            return estimate(
                state["sums"][layer, :, slot], state["squares"][layer, :, slot], state["counts"][layer, :, slot]
            )

        loads = (self._state[name][layer] for name in ("base_load", "model_load"))
        base_load, model_load = (load(counts) if counts.any() else None for counts in loads)
        return LayerResult(
            layer=layer,
            kind=self.model.layer_kinds[layer],
            routing=_routing_result(of),
            base_load=base_load,
            model_load=model_load,
            indexer_overlap=of(_SLOTS["indexer_overlap"]),
            hidden_error=of(_SLOTS["hidden_error"]),
            hidden_cosine=of(_SLOTS["hidden_cosine"]),
        )

    def output_result(self) -> OutputResult | None:
        """The outputs compared; None when none was seen."""
        values = self._state["output"]
        if not self.scored:
            return None
        chunk_of = self._chunk_of()

        def mean(column: Array) -> Estimate:
            found = estimate_tokens(column, chunk_of, self.tokens.chunks)
            assert found is not None
            return found

        def exponential(column: Array) -> Estimate:
            found = mean(column)
            value = _exponential(found.value)
            return transformed(found, value, value)

        base, model, kl, top1, square = (values[:, slot] for slot in range(len(measures.OUTPUT)))
        squared = mean(square)
        rms = math.sqrt(squared.value)
        known = kl[~np.isnan(kl)]
        return OutputResult(
            base_perplexity=exponential(base),
            model_perplexity=exponential(model),
            perplexity_ratio=exponential(model - base),
            kl=mean(kl),
            kl_quantiles=kl_quantiles(known),
            kl_histogram=histogram(known),
            top1_agreement=mean(top1),
            probability_rms=transformed(squared, rms, 0.5 / rms if rms else 0.0),
            chunk_base_perplexity=self._by_chunk(base),
            chunk_model_perplexity=self._by_chunk(model),
            from_trace=bool(self._state["from_trace"][0]),
        )

    def flags(self) -> tuple[str, ...]:
        """Findings that a reader must see."""
        output = self._state["output"]
        base, model = (self._by_chunk(output[:, slot]) for slot in (0, 1))
        if base and model[0] > 2 * base[0]:
            return (
                f"the first chunk's perplexity is {model[0]:.4g}, over twice the baseline's {base[0]:.4g}:"
                " the model is broken, not just rounded",
            )
        return ()

    def _by_chunk(self, column: Array) -> tuple[float, ...]:
        means = []
        for place in self.tokens.places():
            part = column[self.tokens.index(place)]
            part = part[~np.isnan(part)]
            if len(part):
                means.append(_exponential(float(part.mean())))
        return tuple(means)

    def _chunk_of(self) -> npt.NDArray[np.int64]:
        return np.arange(self.tokens.tokens, dtype=np.int64) // self.tokens.context


def _exponential(value: float) -> float:
    """Perplexity of a mean; a ruined model's must still be a number."""
    return math.exp(min(value, 700.0))


def check_same_model(base: ModelIdentity, model: ModelIdentity) -> None:
    """Refuse two models whose layers or experts do not correspond.

    Raises:
        InputError: names the first difference.
    """
    for what in ("layers", "experts", "used", "moe_layers", "layer_kinds"):
        mine, other = getattr(base, what), getattr(model, what)
        if mine != other:
            shown = f": {mine} and {other}" if isinstance(mine, int) else ""
            raise InputError(
                f"{base.label} and {model.label} differ in {what.replace('_', ' ')}{shown}",
                "compare a GGUF with the checkpoint that it was made from",
            )


def check_finite(logits: npt.NDArray[np.float32], label: str, chunk: int) -> None:
    """Refuse logits that are no numbers.

    Raises:
        InputError: names the model and the chunk.
    """
    bad = int((~np.isfinite(logits)).sum())
    if bad:
        raise InputError(
            f"{label}, chunk {chunk}: {bad} logits are NaN or infinite",
            "no figure of this model means anything; verify the file against its source",
        )


def check_layer_finite(seen: LayerObservation, label: str, layer: int, chunk: int) -> None:
    """Refuse router scores and hidden states that are no numbers, hours before they reach the output.

    Raises:
        InputError: names the model, the layer and the chunk.
    """
    parts = {"router scores": seen.router_probs, "router weights": seen.expert_weights, "hidden states": seen.hidden}
    for what, values in parts.items():
        if values is not None and not np.isfinite(values).all():
            raise InputError(
                f"{label}, layer {layer}, chunk {chunk}: {what} are NaN or infinite",
                "no figure of this model means anything; verify the file against its source",
            )


def _routing_result(of: Callable[[int], Estimate | None]) -> RoutingResult | None:
    exact, overlap, weighted, top1, kl = (of(_SLOTS[name]) for name in measures.ROUTING)
    if exact is None or overlap is None or weighted is None or top1 is None:
        return None
    return RoutingResult(exact, overlap, weighted, top1, kl)
