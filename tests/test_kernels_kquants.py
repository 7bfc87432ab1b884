"""The native encoders of Q4_K, Q3_K and Q2_K: same bytes on every path, less error than ggml, never much more."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from encoder_samples import (
    adversarial_importance,
    adversarial_rows,
    assert_all_paths_agree,
    block_errors,
    ggml_errors,
    hostile_importance,
    hostile_rows,
    judged,
    one_row,
    random_rows,
)
from hypothesis import example, given, settings

from quant import mxfp4, native
from quant.tensors import F32Array, Mxfp4Rows
from quant.types import QuantType

Q = QuantType
TYPES = [Q.Q4_K, Q.Q3_K, Q.Q2_K]
ANY_CODE = list(range(16))
BARS = {
    None: {Q.Q4_K: 0.90, Q.Q3_K: 0.88, Q.Q2_K: 0.745},
    0.7: {Q.Q4_K: 0.94, Q.Q3_K: 0.96, Q.Q2_K: 0.92},
    1.5: {Q.Q4_K: 0.86, Q.Q3_K: 0.92, Q.Q2_K: 0.88},
}


def name(value: object) -> str:
    return value.name if isinstance(value, Q) else str(value)


@cache
def weights_like_a_model(family: str, rule: str) -> Mxfp4Rows:
    """Rows of Gaussian or Student-t(5) weights, the scale spread from row to row, as MXFP4 by one of the two rules."""
    rng = np.random.default_rng([1, family == "t5"])
    raw = rng.standard_normal((36, 3584)) if family == "gauss" else rng.standard_t(5, (36, 3584))
    spread = np.exp(0.3 * rng.standard_normal((36, 1)))
    return mxfp4.quantize((0.02 * spread * raw).astype(np.float32), rule)  # type: ignore[arg-type]


def log_normal(sigma: float | None, columns: int) -> F32Array | None:
    if sigma is None:
        return None
    return np.exp(sigma * np.random.default_rng(2).standard_normal(columns)).astype(np.float32)


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("kind", ["model", "random", "adversarial"])
def test_every_instruction_set_writes_the_bytes_of_the_scalar_code(
    kind: str, qtype: QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "model": weights_like_a_model("t5", "ceil"),
        "random": random_rows(5, 40, 256 * 5, (114, 118)),
        "adversarial": adversarial_rows(256 * 5),
    }[kind]
    columns = rows.packed.shape[1] * 2
    for importance in (None, log_normal(1.5, columns), adversarial_importance(columns)):
        assert_all_paths_agree(rows, qtype, importance, monkeypatch)


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("sigma", [None, 0.7, 1.5])
def test_weights_like_a_model_s_lose_less_than_with_ggml(sigma: float | None, qtype: QuantType) -> None:
    for family in ("gauss", "t5"):
        for rule in ("floor", "ceil"):
            rows = weights_like_a_model(family, rule)
            importance = log_normal(sigma, 3584)
            ours = block_errors(native.encode(rows, qtype, importance), rows, qtype, importance)
            theirs = ggml_errors(rows, qtype, importance)
            assert ours.sum() <= BARS[sigma][qtype] * theirs.sum()
            assert (ours <= 1.05 * theirs).all()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("scales", [(117, 117), (116, 118), (114, 121), (104, 136), (100, 112), (136, 152)], ids=str)
def test_random_codes_lose_less_than_with_ggml(scales: tuple[int, int], qtype: QuantType) -> None:
    rows = random_rows(scales[0], 60, 256, scales)
    for sigma in (None, 0.7, 1.5, 2.5, 4.0):
        importance = log_normal(sigma, 256)
        data = native.encode(rows, qtype, importance)
        assert np.isfinite(judged(data, qtype, 256)).all()
        ours, theirs = block_errors(data, rows, qtype, importance), ggml_errors(rows, qtype, importance)
        assert (ours <= 1.05 * theirs).all() and ours.sum() <= theirs.sum()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("sigma", [1.5, 2.5, 4.0])
def test_a_few_columns_that_outweigh_the_rest_lose_no_more_than_with_ggml(sigma: float, qtype: QuantType) -> None:
    for seed in range(6):
        rows = random_rows(seed, 30, 3584, (116, 119))
        rng = np.random.default_rng(seed)
        importance = np.exp(sigma * rng.standard_normal(3584)).astype(np.float32)
        ours = block_errors(native.encode(rows, qtype, importance), rows, qtype, importance)
        theirs = ggml_errors(rows, qtype, importance)
        assert (ours <= 1.05 * theirs).all() and ours.sum() <= theirs.sum()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_no_adversarial_row_is_worse_than_ggml_s(qtype: QuantType) -> None:
    rows = adversarial_rows(256 * 3)
    for importance in (None, log_normal(1.5, 256 * 3), adversarial_importance(256 * 3)):
        data = native.encode(rows, qtype, importance)
        assert np.isfinite(judged(data, qtype, 256 * 3)).all()
        ours, theirs = block_errors(data, rows, qtype, importance), ggml_errors(rows, qtype, importance)
        assert (ours <= 1.05 * theirs).all()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@settings(max_examples=150, deadline=None)
@given(rows=hostile_rows(), importance=hostile_importance())
@example(rows=one_row(ANY_CODE, [100, 110, 120, 130, 140, 90, 150, 105]), importance=None)
@example(rows=one_row([1, 0], [3] * 8), importance=np.zeros(256, np.float32))
@example(rows=one_row([15, 0, 0, 0], [120] * 8), importance=np.resize(np.array([1e-6, 1], np.float32), 256))
def test_no_super_block_is_much_worse_than_ggml_s(
    qtype: QuantType, rows: Mxfp4Rows, importance: F32Array | None
) -> None:
    data, stats = native.encode_with_stats(rows, qtype, importance)
    assert np.isfinite(judged(data, qtype, 256)).all()
    assert 0 <= stats.exact + stats.clipped <= stats.blocks
    ours, theirs = block_errors(data, rows, qtype, importance), ggml_errors(rows, qtype, importance)
    assert (ours <= 1.05 * theirs).all()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_zeros_stay_zeros(qtype: QuantType) -> None:
    for code in (0, 8):
        data, stats = native.encode_with_stats(one_row([code], [0, 252, 127, 3, 104, 143, 200, 60]), qtype)
        decoded = judged(data, qtype, 256)
        assert not decoded.any() and stats.exact == stats.blocks


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_a_block_of_zeros_among_others_decodes_to_zeros(qtype: QuantType) -> None:
    rows = random_rows(6, 20, 256, (117, 118))
    rows.packed[:, 48:64] = np.where(np.arange(16) % 2, 0x88, 0x08)
    rows.scales[:, 3] = 252
    assert not judged(native.encode(rows, qtype), qtype, 256)[:, 96:128].any()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("code", [1, 2, 7, 9, 15])
def test_a_single_nonzero_value_stands_alone(code: int, qtype: QuantType) -> None:
    for place in (0, 17, 255):
        codes = np.zeros(256, dtype=np.uint8)
        codes[place] = code
        rows = one_row(codes, [118] * 8)
        decoded, values = judged(native.encode(rows, qtype), qtype, 256), mxfp4.decode(rows)
        np.testing.assert_allclose(decoded, values, rtol=2.0**-10)


def test_blocks_that_span_fifteen_half_steps_are_nearly_exact_in_q4_k() -> None:
    rng = np.random.default_rng(3)
    codes = rng.choice(np.array([0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13], np.uint8), 256)  # -3 .. 4
    rows = one_row(codes, [120, 121, 120, 119, 120, 121, 121, 120])
    error = block_errors(native.encode(rows, Q.Q4_K), rows, Q.Q4_K).sum()
    assert error < 1e-5 * float((mxfp4.decode(rows).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_values_beyond_the_format_s_range_end_at_its_limits(qtype: QuantType) -> None:
    rows = one_row([7, 15, 0, 2], [252] * 8)
    data, stats = native.encode_with_stats(rows, qtype)
    large, negative, zero, middling = judged(data, qtype, 256)[0, :4]
    assert large >= middling > 6e4 and negative <= 0 and abs(zero) < 1e-3 * large
    assert stats.clipped == stats.blocks and stats.exact == 0
    assert not judged(native.encode(one_row([7, 15, 0, 2], [3] * 8), qtype), qtype, 256).any()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_scales_too_fine_for_fp16_use_what_it_has(qtype: QuantType) -> None:
    """A scale byte of 110 puts the largest value near 100 of fp16's smallest steps."""
    rows = random_rows(7, 40, 256, (110, 110))
    data, stats = native.encode_with_stats(rows, qtype)
    ours, theirs = block_errors(data, rows, qtype), ggml_errors(rows, qtype)
    assert stats.clipped == stats.blocks and ours.sum() < 0.95 * theirs.sum()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_a_row_does_not_depend_on_the_rows_around_it(qtype: QuantType) -> None:
    rows, importance = random_rows(3, 3, 256 * 7), log_normal(0.7, 256 * 7)
    whole = native.encode(rows, qtype, importance)
    single = native.encode(Mxfp4Rows(rows.packed[1:2], rows.scales[1:2]), qtype, importance)
    np.testing.assert_array_equal(whole[1:2], single)


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_only_ratios_of_importance_matter(qtype: QuantType) -> None:
    rows, importance = weights_like_a_model("gauss", "floor"), log_normal(1.5, 3584)
    assert importance is not None
    base = native.encode(rows, qtype, importance)
    np.testing.assert_array_equal(native.encode(rows, qtype, importance * np.float32(2.0**20)), base)


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_columns_without_importance_give_way_but_are_not_lost(qtype: QuantType) -> None:
    rows = random_rows(8, 30, 256, (118, 118))
    importance = np.ones(256, np.float32)
    importance[::2] = 0
    values = mxfp4.decode(rows).astype(np.float64)
    equal, ours = ((judged(native.encode(rows, qtype, w), qtype, 256) - values) ** 2 for w in (None, importance))
    assert ours[:, 1::2].sum() < 0.97 * equal[:, 1::2].sum()
    assert ours[:, ::2].sum() < 0.2 * (values[:, ::2] ** 2).sum()
