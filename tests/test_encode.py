"""From any source to any type: moves of bits, exact decoding before encoding, refused values, both encoders."""

from __future__ import annotations

import numpy as np
import pytest

from quant import ggml, mxfp4
from quant.encode import encode, to_float
from quant.errors import InputError, UsageError, ValueFault
from quant.tensors import Bf16Rows, F32Rows, Mxfp4Rows, Rows
from quant.types import QuantType, row_bytes

Q = QuantType


def values(rows: int = 4, columns: int = 512) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def packed(rows: int = 4, columns: int = 512) -> Mxfp4Rows:
    return mxfp4.quantize(values(rows, columns) * np.float32(0.02))


def bf16(rows: int = 4, columns: int = 512) -> Bf16Rows:
    return Bf16Rows((values(rows, columns).view(np.uint32) >> 16).astype(np.uint16))


SOURCES: list[Rows] = [packed(), bf16(), F32Rows(values())]
IDS = ["MXFP4", "BF16", "F32"]


def test_a_type_that_the_source_has_is_a_move_of_bits() -> None:
    np.testing.assert_array_equal(encode(packed(), Q.MXFP4, encoder="ggml"), mxfp4.repack(packed()))
    np.testing.assert_array_equal(encode(bf16(), Q.BF16, encoder="ggml"), bf16().bits.view(np.uint8))
    np.testing.assert_array_equal(encode(F32Rows(values()), Q.F32, encoder="ggml"), values().view(np.uint8))


@pytest.mark.parametrize("rows", SOURCES, ids=IDS)
@pytest.mark.parametrize("qtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.IQ4_XS], ids=lambda t: t.name)
def test_everything_else_is_decoded_exactly_and_encoded_once(rows: Rows, qtype: QuantType) -> None:
    out = encode(rows, qtype, encoder="ggml")
    assert out.shape == (4, row_bytes(qtype, 512))
    np.testing.assert_array_equal(out, ggml.encode(to_float(rows), qtype))


@pytest.mark.parametrize("qtype", [Q.F32, Q.BF16], ids=lambda t: t.name)
def test_mxfp4_weights_are_exact_in_bf16_and_f32(qtype: QuantType) -> None:
    data = encode(packed(), qtype, encoder="ggml")
    np.testing.assert_array_equal(ggml.decode(data, qtype, 512), mxfp4.decode(packed()))


def test_importance_reaches_the_encoder() -> None:
    importance = np.random.default_rng(1).lognormal(0, 1, 512).astype(np.float32)
    out = encode(packed(), Q.Q3_K, encoder="ggml", importance=importance)
    np.testing.assert_array_equal(out, ggml.encode(to_float(packed()), Q.Q3_K, importance))
    with pytest.raises(InputError, match="importance"):
        encode(packed(), Q.Q3_K, encoder="ggml", importance=importance[:256])


def test_the_native_encoder_falls_back_to_ggml_where_it_has_none() -> None:
    for rows in (bf16(), F32Rows(values())):
        native, theirs = (encode(rows, Q.Q8_0, encoder=e) for e in ("native", "ggml"))  # type: ignore[arg-type]
        np.testing.assert_array_equal(native, theirs)
    np.testing.assert_array_equal(
        encode(packed(), Q.IQ4_NL, encoder="native"), encode(packed(), Q.IQ4_NL, encoder="ggml")
    )


@pytest.mark.parametrize("encoder", ["ggml", "native"])
@pytest.mark.parametrize("qtype", [Q.MXFP4, Q.Q8_0, Q.Q4_K, Q.BF16], ids=lambda t: t.name)
def test_a_nan_scale_stops_with_its_row(encoder: str, qtype: QuantType) -> None:
    rows = packed()
    rows.scales[2, 3] = 255
    with pytest.raises(ValueFault, match="scale byte 255 of columns 96 to 127 is NaN") as fault:
        encode(rows, qtype, encoder=encoder)  # type: ignore[arg-type]
    assert fault.value.row == 2


@pytest.mark.parametrize("encoder", ["ggml", "native"])
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("qtype", [Q.BF16, Q.F32, Q.Q4_K], ids=lambda t: t.name)
def test_a_bf16_weight_that_is_not_finite_stops_with_its_row(bits: int, qtype: QuantType, encoder: str) -> None:
    rows = bf16()
    rows.bits[3, 17] = bits
    with pytest.raises(ValueFault, match="column 17") as fault:
        encode(rows, qtype, encoder=encoder)  # type: ignore[arg-type]
    assert fault.value.row == 3


def test_the_largest_bf16_weight_is_finite() -> None:
    rows = Bf16Rows(np.array([[0x7F7F, 0xFF7F, 0x8000, 1]], np.uint16))
    assert encode(rows, Q.BF16, encoder="ggml").shape == (1, 8)


@pytest.mark.parametrize("qtype", [Q.F32, Q.Q6_K], ids=lambda t: t.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_f32_weight_that_is_not_finite_stops_with_its_row(value: float, qtype: QuantType) -> None:
    rows = values()
    rows[1, 2] = value
    with pytest.raises(ValueFault, match="column 2") as fault:
        encode(F32Rows(rows), qtype, encoder="native")
    assert fault.value.row == 1


def test_an_unknown_encoder_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown encoder 'best'"):
        encode(packed(), Q.Q4_K, encoder="best")  # type: ignore[arg-type]
