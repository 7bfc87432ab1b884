"""Measures of an evaluation against plain definitions, and their standard errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from verify_support import identity, token_set

from kimi_gguf.verify import measures
from kimi_gguf.verify.bars import Bars
from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.estimates import estimate, histogram, load, quantile
from kimi_gguf.verify.observations import FullLogits, LayerObservation, Place
from quant.errors import InputError, UsageError


def routed(ids: list[list[int]], weights: list[list[float]]) -> LayerObservation:
    return LayerObservation(np.array(ids, dtype=np.int32), np.array(weights, dtype=np.float32))


def test_routing_counts_sets_not_order() -> None:
    base = routed([[1, 2], [1, 2], [1, 2]], [[0.7, 0.3]] * 3)
    model = routed([[2, 1], [1, 5], [6, 5]], [[0.3, 0.7], [0.7, 0.3], [0.5, 0.5]])
    found = measures.layer_measures(base, model, 0, None)
    assert found["exact"].tolist() == [1, 0, 0]
    assert found["overlap"].tolist() == [1, 0.5, 0]
    assert found["weighted_overlap"].tolist() == pytest.approx([1, 0.7, 0])
    assert found["top1_changed"].tolist() == [0, 0, 1]


def test_router_divergence_is_that_of_normalised_scores() -> None:
    p, q = np.array([[0.2, 0.6, 0.2]]), np.array([[0.9, 0.3, 0.3]])
    found = measures.distribution_kl(p.astype(np.float32), q.astype(np.float32))
    q = q / q.sum()
    assert found[0] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-6)


def test_indexer_overlap_concerns_only_tokens_that_drop_keys() -> None:
    base, model = np.tri(6, dtype=bool), np.tri(6, dtype=bool)
    base[4, 0] = base[5, 0] = base[5, 1] = False
    model[4, 1] = model[5, 0] = model[5, 2] = False
    found = measures.indexer_overlap(base, model, 0, 4)
    assert np.isnan(found[:4]).all()
    assert found[4:].tolist() == [0.75, 0.75]


def test_hidden_states_by_relative_error_and_cosine() -> None:
    a = np.array([[3, 4], [1, 0]], dtype=np.float32)
    b = np.array([[3, 4], [0, 1]], dtype=np.float32)
    found = measures.layer_measures(LayerObservation(hidden=a), LayerObservation(hidden=b), 0, None)
    assert found["hidden_error"].tolist() == pytest.approx([0, math.sqrt(2)])
    assert found["hidden_cosine"].tolist() == [1, 0]


def test_equal_logits_have_no_divergence_at_all() -> None:
    logits = FullLogits(np.random.default_rng(1).normal(size=(50, 99)).astype(np.float32) * 9)
    found = measures.output_measures(logits, logits, np.arange(50, dtype=np.int32))
    assert (found["kl"] == 0).all() and (found["top1"] == 1).all() and (found["probability_square"] == 0).all()
    assert (found["base_nll"] == found["model_nll"]).all()


def test_output_measures_by_their_definitions() -> None:
    rng = np.random.default_rng(2)
    base, model = (rng.normal(size=(20, 31)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 31, 20).astype(np.int32)
    found = measures.output_measures(FullLogits(base), FullLogits(model), targets)
    p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1, keepdims=True) for x in (base, model))
    rows = np.arange(20)
    assert found["kl"] == pytest.approx((p * np.log(p / q)).sum(1))
    assert found["base_nll"] == pytest.approx(-np.log(p[rows, targets]))
    assert found["probability_square"] == pytest.approx((q[rows, targets] - p[rows, targets]) ** 2)


def test_few_chunks_take_the_error_from_tokens() -> None:
    values = np.random.default_rng(3).normal(size=100)
    parts = values.reshape(2, 50)
    found = estimate(parts.sum(1), (parts**2).sum(1), np.array([50, 50]))
    assert found is not None and found.over == "tokens" and found.count == 100
    assert found.error == pytest.approx(values.std(ddof=1) / 10)


def test_many_chunks_take_the_error_from_chunks() -> None:
    means = np.random.default_rng(4).normal(size=10)
    found = estimate(means * 7, means**2 * 7, np.full(10, 7))
    assert found is not None and found.over == "chunks" and found.count == 10
    assert found.error == pytest.approx(means.std(ddof=1) / math.sqrt(10))


def test_a_constant_has_no_error_and_nothing_has_no_estimate() -> None:
    found = estimate(np.array([0.1 * 30]), np.array([0.01 * 30]), np.array([30]))
    assert found is not None and found.error == 0
    assert estimate(np.zeros(3), np.zeros(3), np.zeros(3, dtype=np.int64)) is None


def test_quantiles_and_their_ranks() -> None:
    ordered = np.arange(1001.0)
    assert quantile(ordered, 0.5).value == 500
    assert quantile(ordered, 0.5).error == pytest.approx(math.sqrt(1001) / 2)
    assert quantile(ordered, 0.9999).error is None


def test_histogram_loses_no_sample() -> None:
    found = histogram(np.array([0.0, 1e-9, 2e-3, 5.0, 1e3]))
    assert (found.below, found.above, sum(found.counts)) == (2, 1, 2)


@pytest.mark.parametrize(("counts", "gini", "used"), [([4, 4, 4, 4], 0, 4), ([0, 0, 0, 9], 0.75, 1), ([0, 0], 0, 0)])
def test_load_of_experts(counts: list[int], gini: float, used: int) -> None:
    found = load(np.array(counts))
    assert found.gini == pytest.approx(gini) and found.used == used and found.never == len(counts) - used


def observe(comparison: Comparison, changed: dict[int, set[int]]) -> None:
    """Two experts per token; ``changed`` maps a layer to tokens that reach others."""
    tokens = comparison.tokens
    for place in tokens.places():
        for layer in comparison.model.moe_layers:
            n = place.end
            ids = np.tile(np.array([[0, 1]], dtype=np.int32), (n, 1))
            others = ids.copy()
            begin = tokens.index(place).start
            for token in changed.get(layer, set()):
                if begin <= token < begin + n:
                    others[token - begin] = [0, 2]
            weights = np.full((n, 2), 0.5, dtype=np.float32)
            comparison.layer(place, layer, LayerObservation(ids, weights), LayerObservation(others, weights))


def test_first_layer_of_divergence() -> None:
    comparison = Comparison(token_set(20, 8), identity(), identity())
    observe(comparison, {1: {3}, 2: {3, 4}})
    found = comparison.divergence()
    assert found is not None
    assert (found.first, found.never, found.mean_layer) == ((0, 1, 1), 18, 1.5)
    routing = comparison.routing()
    assert routing is not None and routing.exact.value == pytest.approx(1 - 3 / 40)
    assert routing.overlap.value == pytest.approx(1 - 1.5 / 40)
    assert [layer.routing is None for layer in comparison.layers()] == [True, False, False]
    assert comparison.layers()[2].model_load is not None


def test_a_snapshot_goes_on_where_it_was_taken() -> None:
    whole, first, second = (Comparison(token_set(20, 8), identity(), identity()) for _ in range(3))
    observe(whole, {1: {3}})
    observe(first, {1: {3}})
    second.restore(first.snapshot())
    assert second.routing() == whole.routing() and second.layers() == whole.layers()
    with pytest.raises(InputError, match="does not fit"):
        second.restore({})


def outputs(comparison: Comparison, scale: float) -> None:
    rng = np.random.default_rng(5)
    for place in comparison.tokens.places():
        n = len(comparison.tokens.targets(place))
        base = rng.normal(size=(n, comparison.tokens.vocab_size)).astype(np.float32)
        comparison.output(place, FullLogits(base), FullLogits(base * scale))


def test_perplexity_and_ratio_agree() -> None:
    comparison = Comparison(token_set(100, 10), identity(), identity())
    outputs(comparison, 0.5)
    found = comparison.output_result()
    assert found is not None and comparison.scored == 90
    assert found.perplexity_ratio.value == pytest.approx(found.model_perplexity.value / found.base_perplexity.value)
    assert found.kl.over == "chunks" and len(found.chunk_base_perplexity) == 10
    assert found.top1_agreement.value == 1 and not comparison.flags()


def test_logits_that_are_no_numbers_fail_the_run() -> None:
    comparison = Comparison(token_set(10, 10), identity(), identity())
    good = np.zeros((9, 64), dtype=np.float32)
    bad = good.copy()
    bad[3, 4] = np.nan
    with pytest.raises(InputError, match="chunk 0: 1 logits are NaN or infinite"):
        comparison.output(Place(0, 0, 10), FullLogits(good), FullLogits(bad))


def test_a_ruined_first_chunk_is_flagged() -> None:
    comparison = Comparison(token_set(10, 10), identity(), identity())
    place = Place(0, 0, 10)
    targets = comparison.tokens.targets(place)
    sure = np.zeros((9, 64), dtype=np.float32)
    sure[np.arange(9), targets] = 9
    comparison.output(place, FullLogits(sure), FullLogits(-sure))
    assert "over twice the baseline's" in comparison.flags()[0]


def test_a_hopeless_model_still_has_a_perplexity() -> None:
    comparison = Comparison(token_set(10, 10), identity(), identity())
    place = Place(0, 0, 10)
    wrong = np.zeros((9, 64), dtype=np.float32)
    wrong[np.arange(9), comparison.tokens.targets(place)] = -5000
    comparison.output(place, FullLogits(np.zeros_like(wrong)), FullLogits(wrong))
    found = comparison.output_result()
    assert found is not None and math.isfinite(found.model_perplexity.value) and math.isfinite(found.kl.value)


def test_models_that_do_not_correspond_are_refused() -> None:
    with pytest.raises(InputError, match="differ in layers: 3 and 4"):
        Comparison(token_set(10, 10), identity(3), identity(4))
    with pytest.raises(InputError, match="differ in experts: 8 and 16"):
        Comparison(token_set(10, 10), identity(), replace(identity(), experts=16))


def test_chunks_of_a_token_set() -> None:
    tokens = token_set(21, 10)
    assert (tokens.chunks, tokens.tokens) == (2, 20)
    assert token_set(22, 10).chunks == 3
    assert [len(tokens.targets(place)) for place in tokens.places()] == [9, 9]
    assert tokens.targets(Place(1, 3, 5)).tolist() == tokens.ids[14:16].tolist()


@pytest.mark.parametrize("bars", [{"min_routing": 1.5}, {"max_kld": -1.0}, {"max_kld": float("nan")}])
def test_bars_that_make_no_sense(bars: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Bars(**bars)
