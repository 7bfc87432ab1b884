"""ggml's encoders behind checks: what they write, and that no input ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import libgguf
import numpy as np
import pytest
from gguf.quants import dequantize

from quant import ggml
from quant.errors import InputError, UsageError, ValueFault
from quant.tensors import F32Array
from quant.types import QuantType, row_bytes

Q = QuantType
TYPES = sorted(ggml.ENCODABLE, key=int)
# Building the grid of IQ1_S and IQ2_S takes the library 10 seconds on first use.
QUICK = [t for t in TYPES if t not in (Q.IQ1_S, Q.IQ1_M, Q.IQ2_S)]
# Relative root mean square error on Gaussian weights, a third above what the types are known for.
ERRORS = {
    Q.F32: 0, Q.F16: 3e-4, Q.BF16: 2.5e-3, Q.MXFP4: 0.15,
    Q.Q4_0: 0.12, Q.Q4_1: 0.11, Q.Q5_0: 0.06, Q.Q5_1: 0.055, Q.Q8_0: 0.008,
    Q.Q2_K: 0.40, Q.Q3_K: 0.20, Q.Q4_K: 0.10, Q.Q5_K: 0.05, Q.Q6_K: 0.025,
    Q.IQ2_XXS: 0.5, Q.IQ2_XS: 0.45, Q.IQ3_XXS: 0.29, Q.IQ3_S: 0.23, Q.IQ4_NL: 0.10, Q.IQ4_XS: 0.11,
}  # fmt: skip


def gaussian(rows: int = 4, columns: int = 512, seed: int = 0) -> F32Array:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def weights(columns: int = 512) -> F32Array:
    return np.random.default_rng(1).lognormal(0, 1, columns).astype(np.float32)


@pytest.mark.parametrize("qtype", QUICK, ids=lambda t: t.name)
def test_what_is_encoded_decodes_to_the_weights_within_the_type_s_error(qtype: QuantType) -> None:
    values = gaussian()
    data = ggml.encode(values, qtype, np.ones(512, np.float32) if qtype in ggml.NEEDS_IMPORTANCE else None)
    assert data.shape == (4, row_bytes(qtype, 512)) and data.dtype == np.uint8
    decoded = ggml.decode(data, qtype, 512)
    assert np.sqrt(np.mean((decoded - values) ** 2) / np.mean(values**2)) <= ERRORS[qtype]


@pytest.mark.parametrize("qtype", QUICK, ids=lambda t: t.name)
def test_two_other_libraries_read_the_same_values(qtype: QuantType) -> None:
    data = ggml.encode(gaussian(), qtype, weights() if qtype in ggml.NEEDS_IMPORTANCE else None)
    decoded = ggml.decode(data, qtype, 512)
    np.testing.assert_allclose(dequantize(data, qtype), decoded, rtol=2e-6)
    if qtype not in (Q.F32, Q.F16, Q.BF16):
        np.testing.assert_allclose(libgguf.dequantize_rows(data, int(qtype), 512), decoded, rtol=2e-6)


@pytest.mark.parametrize("qtype", [Q.F16, Q.BF16])
def test_half_types_round_to_nearest_even(qtype: QuantType) -> None:
    values = np.concatenate([gaussian(1), np.array([[2.0**-14 * 1.5, 2.0**-24, 1 + 2.0**-8, 1 + 3 * 2.0**-9]])], axis=1)
    values = values.astype(np.float32)
    data = ggml.encode(values, qtype)
    np.testing.assert_array_equal(data, gguf.quants.quantize(values, qtype).view(np.uint8))


def test_each_row_is_encoded_for_itself() -> None:
    values = gaussian(6)
    whole = ggml.encode(values, Q.Q4_K, weights())
    rows = [ggml.encode(values[i : i + 1], Q.Q4_K, weights()) for i in range(6)]
    np.testing.assert_array_equal(whole, np.concatenate(rows))


def test_importance_lowers_the_weighted_error() -> None:
    values, importance = gaussian(64), weights()

    def loss(given: F32Array | None) -> float:
        decoded = ggml.decode(ggml.encode(values, Q.Q3_K, given), Q.Q3_K, 512)
        return float(((decoded - values) ** 2 * importance).sum())

    assert loss(importance) < 0.95 * loss(None)


def test_threads_write_the_same_bytes() -> None:
    values = gaussian(64)
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda i: ggml.encode(values[8 * i : 8 * i + 8], Q.IQ3_XXS), range(8))
    np.testing.assert_array_equal(np.concatenate(list(parts)), ggml.encode(values, Q.IQ3_XXS))


@pytest.mark.parametrize("qtype", sorted(ggml.NEEDS_IMPORTANCE, key=int), ids=lambda t: t.name)
def test_types_that_need_importance_say_so(qtype: QuantType) -> None:
    with pytest.raises(InputError, match=f"{qtype.name} cannot be encoded without an importance matrix"):
        ggml.encode(gaussian(), qtype)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_with_row_and_column(value: float) -> None:
    values = gaussian()
    values[2, 7] = value
    with pytest.raises(ValueFault, match="column 7") as fault:
        ggml.encode(values, Q.Q4_K)
    assert fault.value.row == 2


@pytest.mark.parametrize("qtype", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q6_K, Q.IQ4_XS, Q.IQ3_S])
def test_weights_beyond_the_type_s_scales_are_refused(qtype: QuantType) -> None:
    values = gaussian()
    values[3, 300] = 3.4e38 if qtype is Q.BF16 else 1e14
    with pytest.raises(ValueFault, match="too large") as fault:
        ggml.encode(values, qtype)
    assert fault.value.row == 3


def test_importance_must_fit_the_columns_and_be_finite_and_not_negative() -> None:
    for importance in (np.ones(256), np.ones((2, 512)), -np.ones(512), np.full(512, np.nan)):
        with pytest.raises(InputError, match="importance"):
            ggml.encode(gaussian(), Q.Q4_K, importance.astype(np.float32))


def test_rows_that_are_not_whole_blocks_and_types_without_encoder_are_refused() -> None:
    with pytest.raises(UsageError, match="not a whole number of Q4_K blocks"):
        ggml.encode(gaussian(1, 128), Q.Q4_K)
    with pytest.raises(UsageError, match="no encoder for Q8_K"):
        ggml.encode(gaussian(), Q.Q8_K)
    with pytest.raises(UsageError, match="not Q8_0 rows of 64 weights"):
        ggml.decode(np.zeros((1, 34), np.uint8), Q.Q8_0, 64)


def test_no_rows_give_no_bytes() -> None:
    assert ggml.encode(np.zeros((0, 256), np.float32), Q.Q4_K).shape == (0, 144)
    assert ggml.decode(np.zeros((0, 144), np.uint8), Q.Q4_K, 256).shape == (0, 256)


EXTREMES = """
import numpy as np
from quant import ggml
from quant.errors import KimiGgufError
from quant.types import QuantType

rng = np.random.default_rng(0)
for qtype in sorted(ggml.ENCODABLE, key=int):
    if qtype.name in ("IQ1_S", "IQ1_M", "IQ2_S"):
        continue
    for weight_scale in (1e-40, 1e-9, 1.0, 1e4, 1e12):
        for importance_scale in (0.0, 1e-38, 1.0, 1e12, 1e37):
            values = rng.standard_normal((1, 256)) * weight_scale * rng.choice([1, 1e-6], (1, 256))
            importance = rng.random(256) * importance_scale * rng.choice([0, 1, 1e-20], 256)
            try:
                data = ggml.encode(values.astype(np.float32), qtype, importance.astype(np.float32))
            except KimiGgufError:
                continue
            assert np.isfinite(ggml.decode(data, qtype, 256)).all(), qtype.name
print("survived")
"""


def test_no_extreme_of_weights_or_importance_ends_the_process() -> None:
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EXTREMES], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "survived\n", done.stderr[-2000:]
