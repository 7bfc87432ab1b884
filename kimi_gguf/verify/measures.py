"""What two runs of a model are compared by, token by token; pure functions on numpy arrays.

All divergences are in nats and are KL(base || model). Arithmetic is float64, so that equal inputs give exactly equal
outputs and exactly zero divergence.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kimi_gguf.verify.observations import (
    BoolArray,
    F32Array,
    FullLogits,
    I32Array,
    LayerObservation,
    OutputObservation,
    TopLogProbs,
)

F64Array = npt.NDArray[np.float64]

ROUTING = ("exact", "overlap", "weighted_overlap", "top1_changed", "router_kl")
LAYER = (*ROUTING, "indexer_overlap", "hidden_error", "hidden_cosine")
OUTPUT = ("base_nll", "model_nll", "kl", "top1", "probability_square")

_SMALLEST = 1e-300


def layer_measures(
    base: LayerObservation, model: LayerObservation, begin: int, top_k: int | None
) -> Mapping[str, F64Array]:
    """Per-token values, F64 [n], of the measures in ``LAYER`` that both observations allow.

    Values are NaN at tokens that a measure does not concern.

    Args:
        begin: position in its chunk of the first token.
        top_k: keys that an indexer keeps, None without indexers.
    """
    found: dict[str, F64Array] = {}
    if base.expert_ids is not None and model.expert_ids is not None:
        found |= _routing(base, model)
    if base.selected is not None and model.selected is not None and top_k is not None:
        found["indexer_overlap"] = indexer_overlap(base.selected, model.selected, begin, top_k)
    if base.hidden is not None and model.hidden is not None:
        found |= _hidden(base.hidden, model.hidden)
    return found


def _routing(base: LayerObservation, model: LayerObservation) -> dict[str, F64Array]:
    ids, others = base.expert_ids, model.expert_ids
    assert ids is not None and others is not None
    common = (ids[:, :, None] == others[:, None, :]).any(axis=2)
    overlap = common.mean(axis=1)
    found = {"exact": (overlap == 1.0).astype(np.float64), "overlap": overlap}
    if base.expert_weights is not None:
        weights = base.expert_weights.astype(np.float64)
        total = weights.sum(axis=1)
        # A token whose experts all weigh nothing loses nothing.
        kept = np.where(total > 0, (weights * common).sum(axis=1) / np.where(total > 0, total, 1.0), 1.0)
        # All in common is exactly 1, whatever the order of summation makes of it.
        found["weighted_overlap"] = np.where(overlap == 1.0, 1.0, kept)
        if model.expert_weights is not None:
            changed = _heaviest(ids, base.expert_weights) != _heaviest(others, model.expert_weights)
            found["top1_changed"] = changed.astype(np.float64)
    if base.router_probs is not None and model.router_probs is not None:
        found["router_kl"] = distribution_kl(base.router_probs, model.router_probs)
    return found


def _heaviest(ids: I32Array, weights: F32Array) -> I32Array:
    best: I32Array = np.take_along_axis(ids, weights.argmax(axis=1)[:, None], axis=1)[:, 0]
    return best


def distribution_kl(base: F32Array, model: F32Array) -> F64Array:
    """KL of rows of non-negative scores, each row first normalised to sum 1; F32 [n, E] -> F64 [n]."""
    p, q = (np.maximum(x.astype(np.float64), _SMALLEST) for x in (base, model))
    log_p, log_q = (np.log(x) - np.log(x.sum(axis=1, keepdims=True)) for x in (p, q))
    kl: F64Array = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=1), 0.0)
    return kl


def indexer_overlap(base: BoolArray, model: BoolArray, begin: int, top_k: int) -> F64Array:
    """Share of the kept keys that both keep, F64 [n]; NaN where all visible keys are kept.

    Args:
        base, model: bool [n, S]; row i is the token at position ``begin + i`` and sees that many keys plus itself.
    """
    width = min(base.shape[1], model.shape[1])
    both = (base[:, :width] & model[:, :width]).sum(axis=1)
    visible = begin + 1 + np.arange(len(base))
    return np.where(visible > top_k, both / np.maximum(base.sum(axis=1), 1), np.nan)


def _hidden(base: F32Array, model: F32Array) -> dict[str, F64Array]:
    """Relative error and cosine of hidden states, F32 [n, d] -> F64 [n] each."""
    a, b = base.astype(np.float64), model.astype(np.float64)
    norm_a, norm_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    error = np.linalg.norm(b - a, axis=1) / np.maximum(norm_a, _SMALLEST)
    cosine = (a * b).sum(axis=1) / np.maximum(norm_a * norm_b, _SMALLEST)
    # Equal vectors have cosine 1, which rounding would miss by an ulp.
    return {"hidden_error": error, "hidden_cosine": np.where(error == 0.0, 1.0, np.minimum(cosine, 1.0))}


def log_softmax(logits: F32Array) -> F64Array:
    """Log-probabilities of rows of logits, F32 [n, V] -> F64 [n, V]."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def output_measures(base: OutputObservation, model: FullLogits, targets: I32Array) -> Mapping[str, F64Array]:
    """Per-token values, F64 [n], of the measures in ``OUTPUT``.

    ``top1`` is 1 where the likeliest token is the same; ``probability_square`` is the squared change of the true
    token's probability.

    Args:
        base: full logits, or what a trace keeps.
        targets: I32 [n], the true next tokens.
    """
    log_q = log_softmax(model.values)
    rows = np.arange(len(targets))
    model_target = log_q[rows, targets]
    if isinstance(base, FullLogits):
        log_p = log_softmax(base.values)
        base_target = log_p[rows, targets]
        kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=1), 0.0)
        best = base.values.argmax(axis=1)
    else:
        base_target = base.target.astype(np.float64)
        kl = top_kl(base, log_q)
        best = base.best
    change = np.exp(model_target) - np.exp(base_target)
    return {
        "base_nll": -base_target,
        "model_nll": -model_target,
        "kl": kl,
        "top1": (best == model.values.argmax(axis=1)).astype(np.float64),
        "probability_square": np.square(change),
    }


def top_kl(base: TopLogProbs, log_q: F64Array) -> F64Array:
    """KL from the baseline's top K tokens and a sample of the others, F64 [n]: an unbiased estimate, never negative.

    KL = sum p f(q / p) with f(r) = r - 1 - log r, which is 0 at its minimum r = 1: equal probabilities give zero term
    by term, and the rounding of what is kept enters squared. The tail's share of the sum is its probability times the
    mean of f over tokens drawn by p.

    Args:
        log_q: F64 [n, V], the model's log-probabilities.
    """
    head = np.exp(base.log_probs.astype(np.float64)) * _excess(log_q, base.ids, base.log_probs)
    drawn = _excess(log_q, base.sample_ids, base.sample_log_probs)
    kl: F64Array = head.sum(axis=1) + base.tail * drawn.mean(axis=1)
    return kl


def _excess(log_q: F64Array, ids: I32Array, log_p: F32Array) -> F64Array:
    """f(q / p) of ``top_kl`` at the tokens ``ids``."""
    ratio = np.take_along_axis(log_q, ids.astype(np.int64), axis=1) - log_p
    # Only a probability of nothing at all gives more, and a weight of nothing goes with it.
    found: F64Array = np.expm1(np.minimum(ratio, 300.0)) - ratio
    return found
