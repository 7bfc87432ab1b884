"""The native encoders from BF16 and F32: less error than ggml's, and the same bytes on every path."""

from __future__ import annotations

import numpy as np
import pytest
from encoder_samples import F64Array, assert_all_paths_agree, judged

from quant import ggml, native
from quant.errors import InputError, UsageError, ValueFault
from quant.tensors import Bf16Rows, F32Array, F32Rows, U8Array
from quant.types import QuantType

Q = QuantType
TYPES = [Q.Q6_K, Q.Q5_K, Q.Q4_K, Q.Q3_K, Q.Q2_K]
COLUMNS = 1536


def name(value: object) -> str:
    return value.name if isinstance(value, Q) else str(value)


def values_of(rows: Bf16Rows) -> F32Array:
    return (rows.bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: F32Array) -> Bf16Rows:
    return Bf16Rows((values.view(np.uint32) >> 16).astype(np.uint16))


def weights_like_a_model(family: str) -> Bf16Rows:
    rng = np.random.default_rng(family == "t5")
    raw = rng.standard_normal((24, COLUMNS)) if family == "gauss" else rng.standard_t(5, (24, COLUMNS))
    return rounded((0.02 * raw).astype(np.float32))


def strange_rows() -> F32Array:
    """Rows of zeros, of few values, of one sign, of single outliers, and of both ends of what the types hold."""
    rng = np.random.default_rng(4)
    plain = rng.standard_normal((14, COLUMNS)).astype(np.float32)
    with np.errstate(under="ignore"):
        plain[0] = 0
        plain[1] = -0.0
        plain[2] = np.where(rng.random(COLUMNS) < 0.01, plain[2], 0)
        plain[3] = np.sign(plain[3]) * 0.5
        plain[4] = np.abs(plain[4])
        plain[5] = -np.abs(plain[5])
        plain[6] = -3
        plain[7, ::256] = 1e6
        plain[8] = np.clip(plain[8], -0.9, 2) * np.float32(1e6)
        plain[9] *= np.float32(1e-38)
        plain[10] *= np.float32(1e-44)
        plain[11] *= np.exp2(rng.integers(-120, 17, COLUMNS)).astype(np.float32)
        plain[12] *= np.float32(6e-8)
        plain[13] = 7
    return plain


def log_normal(sigma: float | None) -> F32Array | None:
    if sigma is None:
        return None
    return np.exp(sigma * np.random.default_rng(2).standard_normal(COLUMNS)).astype(np.float32)


def error(data: U8Array, qtype: QuantType, values: F32Array, importance: F32Array | None) -> F64Array:
    squares = (ggml.decode(data, qtype, COLUMNS).astype(np.float64) - values) ** 2
    return squares if importance is None else squares * importance


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("sigma", [None, 0.7, 1.5])
@pytest.mark.parametrize("family", ["gauss", "t5"])
def test_weights_like_a_model_s_lose_less_than_with_ggml(family: str, sigma: float | None, qtype: QuantType) -> None:
    rows, importance = weights_like_a_model(family), log_normal(sigma)
    values = values_of(rows)
    ours = error(native.encode(rows, qtype, importance), qtype, values, importance)
    theirs = error(ggml.encode(values, qtype, importance), qtype, values, importance)
    assert ours.sum() < 0.99 * theirs.sum()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_every_instruction_set_writes_the_bytes_of_the_scalar_code(
    qtype: QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (F32Rows(strange_rows()), weights_like_a_model("t5")):
        for importance in (None, log_normal(1.5), log_normal(6.0)):
            assert_all_paths_agree(rows, qtype, importance, monkeypatch)


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_strange_rows_decode_to_finite_numbers_that_all_readers_agree_on(qtype: QuantType) -> None:
    values = strange_rows()
    data, stats = native.encode_with_stats(F32Rows(values), qtype)
    decoded = judged(data, qtype, COLUMNS)
    assert np.isfinite(decoded).all()
    assert not decoded[:2].any()
    np.testing.assert_allclose(decoded[3], values[3], rtol=0.02)
    for row in (6, 13):
        np.testing.assert_allclose(decoded[row], values[row], rtol=0.02)
    assert (decoded[4] >= 0).all() or qtype in (Q.Q5_K, Q.Q4_K, Q.Q2_K)
    assert stats.blocks == values.size // 256 and stats.clipped >= 2 * COLUMNS // 256


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_bf16_is_encoded_as_the_same_numbers_in_f32(qtype: QuantType) -> None:
    rows = weights_like_a_model("gauss")
    np.testing.assert_array_equal(native.encode(rows, qtype), native.encode(F32Rows(values_of(rows)), qtype))


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_a_power_of_two_moves_scales_alone(qtype: QuantType) -> None:
    rows = values_of(weights_like_a_model("t5")) * 4096  # scales that fp16 holds with all its digits
    plain, larger = (ggml.decode(native.encode(F32Rows(v), qtype), qtype, COLUMNS) for v in (rows, rows * 8))
    np.testing.assert_array_equal(plain * 8, larger)


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    rows = weights_like_a_model("t5")
    whole = native.encode(rows, Q.Q4_K)
    np.testing.assert_array_equal(native.encode(Bf16Rows(rows.bits[5:7]), Q.Q4_K), whole[5:7])
    np.testing.assert_array_equal(native.encode(Bf16Rows(rows.bits[::2]), Q.Q4_K), whole[::2])


@pytest.mark.parametrize("qtype", TYPES, ids=name)
@pytest.mark.parametrize("weight", [-1e20, 1e20, np.inf, np.nan])
def test_weights_beyond_the_type_are_refused_with_their_row(weight: float, qtype: QuantType) -> None:
    values = values_of(weights_like_a_model("gauss"))
    values[7, 300] = weight
    for rows in (F32Rows(values), rounded(values)):
        with pytest.raises(ValueFault, match=f"is too large for {qtype.name}") as fault:
            native.encode(rows, qtype)
        assert fault.value.row == 7


@pytest.mark.parametrize(
    ("qtype", "least"), [(Q.Q5_K, -65504.0 * 63), (Q.Q4_K, -65504.0 * 63), (Q.Q2_K, -65504.0 * 15)], ids=name
)
def test_the_smallest_weight_is_that_of_the_largest_minimum(qtype: QuantType, least: float) -> None:
    values = np.zeros((1, COLUMNS), np.float32)
    values[0, 3] = least
    decoded = ggml.decode(native.encode(F32Rows(values), qtype), qtype, COLUMNS)
    np.testing.assert_allclose(decoded[0, 3], least, rtol=1e-3)
    values[0, 3] = 1.01 * least
    with pytest.raises(ValueFault, match="too large"):
        native.encode(F32Rows(values), qtype)


def test_what_cannot_be_encoded_is_refused() -> None:
    rows = weights_like_a_model("gauss")
    assert not native.supports("BF16", Q.Q8_0) and not native.supports("F32", Q.IQ4_XS)
    with pytest.raises(UsageError, match="does not turn BF16 into Q8_0"):
        native.encode(rows, Q.Q8_0)
    with pytest.raises(UsageError, match="300"):
        native.encode(Bf16Rows(rows.bits[:, :300]), Q.Q4_K)
    with pytest.raises(UsageError, match="float32"):
        native.encode(F32Rows(rows.bits), Q.Q4_K)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="importance"):
        native.encode(rows, Q.Q4_K, np.ones(256, np.float32))
