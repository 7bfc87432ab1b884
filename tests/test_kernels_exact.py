"""The native encoders of Q8_0, Q6_K, Q5_K, MXFP4 and the formats with plain blocks of 32."""

from __future__ import annotations

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
from hypothesis import strategies as st

from quant import mxfp4, native
from quant.tensors import F32Array, Mxfp4Rows
from quant.types import QuantType

Q = QuantType
EXACT = [Q.Q8_0, Q.Q6_K, Q.Q5_K]
PLAIN = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]
ALL = [Q.MXFP4, *EXACT, *PLAIN]
ANY_CODE = list(range(16))


def name(qtype: QuantType) -> str:
    return qtype.name


def encoded_exactly(rows: Mxfp4Rows, qtype: QuantType) -> bool:
    """Whether all blocks decode to the source's values; the encoder's own count must say the same."""
    data, stats = native.encode_with_stats(rows, qtype)
    values = mxfp4.decode(rows)
    equal = (judged(data, qtype, values.shape[1]) == values).reshape(stats.blocks, -1).all(axis=1)
    assert int(equal.sum()) == stats.exact
    return bool(equal.all())


def test_mxfp4_blocks_hold_the_same_codes() -> None:
    rows = random_rows(0, 5, 32 * 7, (0, 252))
    np.testing.assert_array_equal(native.encode(rows, Q.MXFP4), mxfp4.repack(rows))


@pytest.mark.parametrize("qtype", EXACT, ids=name)
def test_weights_rounded_to_mxfp4_come_back_unchanged(qtype: QuantType) -> None:
    weights = np.random.default_rng(0).standard_t(5, (16, 3072)).astype(np.float32) * np.float32(0.02)
    assert encoded_exactly(mxfp4.quantize(weights, "floor"), qtype)
    assert encoded_exactly(mxfp4.quantize(weights, "ceil"), qtype)


@pytest.mark.parametrize(
    ("qtype", "first", "last"),
    [(Q.Q8_0, 104, 146), (Q.Q6_K, 104, 151), (Q.Q5_K, 104, 145), (Q.Q5_0, 104, 143), (Q.Q5_1, 104, 140)],
    ids=lambda v: v.name if isinstance(v, Q) else str(v),
)
def test_equal_scales_are_exact_in_the_range_of_fp16_and_nowhere_else(qtype: QuantType, first: int, last: int) -> None:
    exact = [s for s in range(253) if encoded_exactly(one_row(ANY_CODE, [s] * 8), qtype)]
    assert exact == list(range(first, last + 1))


@pytest.mark.parametrize(("qtype", "spread"), [(Q.Q6_K, 8), (Q.Q5_K, 5)], ids=["Q6_K", "Q5_K"])
@pytest.mark.parametrize("base", [104, 117, 132])
def test_scales_may_spread_so_far_and_no_further(qtype: QuantType, spread: int, base: int) -> None:
    for place in range(8):
        scales = [base] * 8
        scales[place] += spread
        assert encoded_exactly(one_row(ANY_CODE, scales), qtype)
        scales[place] += 1
        assert not encoded_exactly(one_row(ANY_CODE, scales), qtype)


@pytest.mark.parametrize("qtype", [Q.Q6_K, Q.Q5_K], ids=name)
def test_levels_that_share_a_factor_of_two_widen_the_spread(qtype: QuantType) -> None:
    spread = 8 if qtype is Q.Q6_K else 5
    eighths = np.where(np.arange(256) < 32, 6, 1).astype(np.uint8)  # one block of 4.0 below the blocks of 0.5
    assert encoded_exactly(one_row(eighths, [110] + [113 + spread] * 7), qtype)


@pytest.mark.parametrize("qtype", ALL, ids=name)
def test_blocks_of_zeros_are_exact_under_any_scale(qtype: QuantType) -> None:
    for code in (0, 8):
        rows = one_row([code], [0, 252, 127, 3, 104, 143, 200, 60])
        data, stats = native.encode_with_stats(rows, qtype)
        decoded = judged(data, qtype, 256)
        assert not decoded.any() and not np.signbit(decoded).any() and stats.exact == stats.blocks


@pytest.mark.parametrize("qtype", EXACT, ids=name)
def test_zero_blocks_do_not_widen_the_spread(qtype: QuantType) -> None:
    codes = np.array(ANY_CODE * 16, dtype=np.uint8)
    codes[64:128] = 0
    assert encoded_exactly(one_row(codes, [117, 119, 0, 252, 118, 117, 116, 120]), qtype)


@pytest.mark.parametrize("qtype", EXACT, ids=name)
@pytest.mark.parametrize("code", [1, 7, 9, 15])
def test_a_single_nonzero_value_is_exact(qtype: QuantType, code: int) -> None:
    for place in (0, 17, 255):
        codes = np.zeros(256, dtype=np.uint8)
        codes[place] = code
        assert encoded_exactly(one_row(codes, [118] * 8), qtype)


@pytest.mark.parametrize("qtype", [*EXACT, Q.Q5_0, Q.Q5_1], ids=name)
def test_minus_zero_becomes_plus_zero(qtype: QuantType) -> None:
    decoded = judged(native.encode(one_row([8, 7, 15, 8], [120] * 8), qtype), qtype, 256)
    assert not np.signbit(decoded[0, 0::4]).any()


@pytest.mark.parametrize("qtype", ALL, ids=name)
def test_rows_of_an_odd_number_of_super_blocks(qtype: QuantType) -> None:
    rows = random_rows(3, 3, 256 * 7)
    whole = native.encode(rows, qtype)
    assert len(whole) == 3
    single = native.encode(Mxfp4Rows(rows.packed[1:2], rows.scales[1:2]), qtype)
    np.testing.assert_array_equal(whole[1:2], single)


@pytest.mark.parametrize("qtype", [Q.MXFP4, Q.Q8_0, *PLAIN], ids=name)
def test_types_with_blocks_of_32_take_rows_that_are_no_multiple_of_256(qtype: QuantType) -> None:
    rows = random_rows(4, 3, 32 * 5)
    error = block_errors(native.encode(rows, qtype), rows, qtype).sum()
    assert error <= 0.02 * float((mxfp4.decode(rows).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("qtype", ALL, ids=name)
def test_every_instruction_set_writes_the_bytes_of_the_scalar_code(
    qtype: QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = adversarial_rows(256 * 3)
    for importance in (None, adversarial_importance(256 * 3)):
        assert_all_paths_agree(rows, qtype, importance, monkeypatch)


@pytest.mark.parametrize("qtype", ALL, ids=name)
def test_values_beyond_the_format_s_range_end_at_its_limits(qtype: QuantType) -> None:
    rows = one_row([7, 15, 0, 2], [252] * 8)
    data, stats = native.encode_with_stats(rows, qtype)
    decoded = judged(data, qtype, 256)
    large, negative, zero, middling = decoded[0, :4]
    assert np.isfinite(decoded).all() and large >= middling > 6e4 and negative <= 0 and abs(zero) < 1e-3 * large
    if qtype is not Q.MXFP4:
        assert stats.clipped == stats.blocks and stats.exact == 0
    small, _ = native.encode_with_stats(one_row([7, 15, 0, 2], [3] * 8), qtype)
    if qtype is not Q.MXFP4:
        assert not judged(small, qtype, 256).any()


def test_q4_0_finds_the_best_scale_of_all() -> None:
    rows = random_rows(5, 40, 32, (120, 120))
    values = mxfp4.decode(rows).astype(np.float64)
    scales = np.arange(0x1400, 0x3000, dtype=np.uint16).view(np.float16).astype(np.float64)
    scales = np.concatenate([scales, -scales])
    ours = block_errors(native.encode(rows, Q.Q4_0), rows, Q.Q4_0)[:, 0]
    for row, error in zip(values, ours, strict=True):
        quants = np.clip(np.rint(row / scales[:, None]), -8, 7)
        best = ((row - scales[:, None] * quants) ** 2).sum(axis=1).min()
        assert error <= best * (1 + 1e-9)


@pytest.mark.parametrize("qtype", [*EXACT, *PLAIN], ids=name)
@settings(max_examples=120, deadline=None)
@given(rows=hostile_rows(), importance=hostile_importance())
@example(rows=one_row(ANY_CODE, [100, 110, 120, 130, 140, 90, 150, 105]), importance=None)
@example(rows=one_row([1, 0], [3] * 8), importance=np.zeros(256, np.float32))
def test_no_block_is_worse_than_ggml_s(qtype: QuantType, rows: Mxfp4Rows, importance: F32Array | None) -> None:
    data, stats = native.encode_with_stats(rows, qtype, importance)
    assert np.isfinite(judged(data, qtype, 256)).all()
    assert 0 <= stats.exact + stats.clipped <= stats.blocks
    ours, theirs = block_errors(data, rows, qtype, importance), ggml_errors(rows, qtype, importance)
    assert (ours <= 1.05 * theirs).all() and ours.sum() <= theirs.sum() * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 252), st.binary(min_size=16, max_size=16))
def test_q8_0_is_exact_or_counted_as_clipped(scale: int, packed: bytes) -> None:
    rows = Mxfp4Rows(np.frombuffer(packed, dtype=np.uint8)[None], np.array([[scale]], np.uint8))
    data, stats = native.encode_with_stats(rows, Q.Q8_0)
    assert stats.exact + stats.clipped == 1
    assert bool((judged(data, Q.Q8_0, 32) == mxfp4.decode(rows)).all()) == bool(stats.exact)
