"""MXFP4: decoding, ggml's blocks, refused scales, and the encoder for synthetic weights."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quant import mxfp4
from quant.errors import UsageError, ValueFault
from quant.tensors import F32Array, Mxfp4Rows


def slow_decode(rows: Mxfp4Rows) -> list[list[float]]:
    """Element by element from the definition, sharing nothing with the module."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = []
    for packed, scales in zip(rows.packed.tolist(), rows.scales.tolist(), strict=True):
        row = []
        for column in range(2 * len(packed)):
            byte = packed[column // 2]
            code = byte >> 4 if column % 2 else byte & 15
            value = math.ldexp(magnitudes[code & 7], scales[column // 32] - 127)
            row.append(-value if code > 8 else value)
        out.append(row)
    return out


def random_rows(seed: int, rows: int = 3, blocks: int = 4, scales: tuple[int, int] = (0, 253)) -> Mxfp4Rows:
    rng = np.random.default_rng(seed)
    return Mxfp4Rows(
        rng.integers(0, 256, (rows, blocks * 16), dtype=np.uint8),
        rng.integers(*scales, (rows, blocks), dtype=np.uint8),
    )


def one_block(code: int, scale: int) -> Mxfp4Rows:
    packed = np.zeros((2, 32), np.uint8)
    packed[1, 20] = code << 4
    scales = np.full((2, 2), 127, np.uint8)
    scales[1, 1] = scale
    return Mxfp4Rows(packed, scales)


def test_the_first_codes_of_the_released_checkpoint_decode_to_their_published_values() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :4] = [22, 185, 206, 35]
    decoded = mxfp4.decode(Mxfp4Rows(packed, np.array([[121]], np.uint8)))
    expected = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert decoded[0, :8].tolist() == expected


def test_decoding_equals_the_definition_for_all_finite_scales() -> None:
    for seed in range(8):
        rows = random_rows(seed)
        np.testing.assert_array_equal(mxfp4.decode(rows), slow_decode(rows))


def test_scale_byte_0_is_2_to_the_minus_127() -> None:
    assert mxfp4.decode(one_block(2, 0))[1, 41] == np.float32(2.0**-127) > 0


def test_code_8_decodes_to_positive_zero() -> None:
    decoded = mxfp4.decode(one_block(8, 127))
    assert not decoded.any() and not np.signbit(decoded).any()


def test_repacked_blocks_decode_to_the_same_values_in_the_gguf_library() -> None:
    rows = random_rows(1, scales=(1, 250))
    judged = dequantize(mxfp4.repack(rows), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(judged, mxfp4.decode(rows))


def test_a_block_is_the_scale_byte_and_then_halves_of_the_block_in_nibbles() -> None:
    packed = np.array([[code | (code + 1) % 16 << 4 for code in (0, 2, 4, 6, 8, 10, 12, 14)] * 2], np.uint8)
    blocks = mxfp4.repack(Mxfp4Rows(packed, np.array([[99]], np.uint8)))
    assert blocks.tolist() == [[99] + [code | code << 4 for code in range(16)]]


@given(hnp.arrays(np.uint8, (2, 32)), hnp.arrays(np.uint8, (2, 2)))
def test_unpacking_undoes_repacking(packed: np.ndarray, scales: np.ndarray) -> None:
    back = mxfp4.unpack(mxfp4.repack(Mxfp4Rows(packed, scales)))
    np.testing.assert_array_equal(back.packed, packed)
    np.testing.assert_array_equal(back.scales, scales)


def test_a_nan_scale_is_refused_with_its_row_and_columns() -> None:
    with pytest.raises(ValueFault, match="scale byte 255 of columns 32 to 63 is NaN") as fault:
        mxfp4.decode(one_block(0, 255))
    assert fault.value.row == 1


@pytest.mark.parametrize(("scale", "largest"), [(253, 5), (254, 3)])
def test_a_scale_that_takes_a_code_beyond_float32_is_refused(scale: int, largest: int) -> None:
    assert np.isfinite(mxfp4.decode(one_block(largest, scale))).all()
    for code in (largest + 1, largest + 9):
        with pytest.raises(ValueFault, match=f"scale byte {scale}") as fault:
            mxfp4.check_scales(one_block(code, scale))
        assert fault.value.row == 1


def test_codes_and_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit"):
        mxfp4.decode(Mxfp4Rows(np.zeros((2, 32), np.uint8), np.zeros((2, 3), np.uint8)))
    with pytest.raises(UsageError, match="whole blocks"):
        mxfp4.unpack(np.zeros((1, 18), np.uint8))


def nearest(values: F32Array, scales: np.ndarray) -> F32Array:
    """The nearest level of each value under given scales, by trying them all."""
    levels = np.unique(mxfp4.LEVELS)
    blocks = values.reshape(len(values), -1, 32).astype(np.float64)
    grid = levels * np.exp2(scales.astype(np.float64) - 127)[:, :, None, None]
    best = np.abs(blocks[..., None] - grid).min(axis=-1)
    return best.reshape(values.shape)


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_the_encoder_takes_the_nearest_level_under_the_rule_s_exponent(rule: str) -> None:
    values = np.random.default_rng(3).standard_normal((4, 96)).astype(np.float32)
    rows = mxfp4.quantize(values, rule)  # type: ignore[arg-type]
    largest = np.abs(values).reshape(4, 3, 32).max(axis=2)
    exponent = np.floor(np.log2(largest)) - 2 if rule == "floor" else np.ceil(np.log2(largest / 6))
    np.testing.assert_array_equal(rows.scales, exponent + 127)
    error = np.abs(mxfp4.decode(rows).astype(np.float64) - values)
    np.testing.assert_allclose(error, nearest(values, rows.scales), atol=1e-12)


def test_ties_go_to_the_even_code() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
    decoded = mxfp4.decode(mxfp4.quantize(np.tile(ties, (1, 4))))
    assert decoded[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@given(
    st.sampled_from(["floor", "ceil"]),
    hnp.arrays(np.float32, (1, 32), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
)
def test_values_that_are_mxfp4_already_come_back_unchanged(rule: str, values: np.ndarray) -> None:
    once = mxfp4.decode(mxfp4.quantize(values, "ceil"))
    np.testing.assert_array_equal(mxfp4.decode(mxfp4.quantize(once, rule)), once)  # type: ignore[arg-type]


def test_an_all_zero_block_gets_scale_127_and_non_finite_values_are_refused() -> None:
    assert mxfp4.quantize(np.zeros((1, 32), np.float32)).scales.tolist() == [[127]]
    values = np.zeros((3, 32), np.float32)
    values[2, 5] = np.nan
    with pytest.raises(ValueFault, match="not finite") as fault:
        mxfp4.quantize(values)
    assert fault.value.row == 2
