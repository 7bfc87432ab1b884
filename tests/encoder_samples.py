"""MXFP4 rows for tests of the native encoders, and how their output is judged."""

from __future__ import annotations

import gguf.quants
import libgguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from quant import ggml, mxfp4, native
from quant.errors import ValueFault
from quant.tensors import F32Array, Mxfp4Rows, Rows, U8Array
from quant.types import QuantType, block_size

F64Array = npt.NDArray[np.float64]


def random_rows(seed: int, rows: int, columns: int, scales: tuple[int, int] = (110, 114)) -> Mxfp4Rows:
    """Uniform codes under scale bytes from ``scales[0]`` to ``scales[1]``."""
    rng = np.random.default_rng(seed)
    return Mxfp4Rows(
        rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
        rng.integers(scales[0], scales[1] + 1, (rows, columns // 32), dtype=np.uint8),
    )


def one_row(codes: list[int] | npt.NDArray[np.uint8], scales: list[int]) -> Mxfp4Rows:
    """One row of 32 codes for each scale byte; fewer codes are repeated."""
    repeated = np.resize(np.asarray(codes, dtype=np.uint8), 32 * len(scales))
    return Mxfp4Rows((repeated[0::2] | repeated[1::2] << 4)[None], np.asarray([scales], dtype=np.uint8))


def adversarial_rows(columns: int) -> Mxfp4Rows:
    """Rows of every kind that an encoder may stumble over, one kind after the other."""
    rng = np.random.default_rng(7)
    kinds = []
    for low, high in ((116, 119), (110, 115), (104, 112), (109, 118), (90, 112), (138, 156), (0, 252)):
        kinds.append(random_rows(low, 3, columns, (low, high)))
        sparse = random_rows(high, 3, columns, (low, high))
        kinds.append(Mxfp4Rows(sparse.packed * (rng.random(sparse.packed.shape) < 0.1), sparse.scales))
    kinds.append(Mxfp4Rows(np.zeros((2, columns // 2), np.uint8), random_rows(0, 2, columns, (0, 252)).scales))
    kinds.append(Mxfp4Rows(np.full((2, columns // 2), 0x88, np.uint8), random_rows(1, 2, columns, (0, 252)).scales))
    return Mxfp4Rows(np.concatenate([k.packed for k in kinds]), np.concatenate([k.scales for k in kinds]))


def adversarial_importance(columns: int) -> F32Array:
    """Weights over twelve orders of magnitude, a fifth of them zero."""
    rng = np.random.default_rng(8)
    return (10.0 ** rng.integers(-9, 3, columns) * (rng.random(columns) < 0.8)).astype(np.float32)


@st.composite
def hostile_rows(draw: st.DrawFn, columns: int = 256) -> Mxfp4Rows:
    """One row of arbitrary codes, or of few distinct ones, under scales near each other or arbitrary."""
    codes = np.frombuffer(draw(st.binary(min_size=columns, max_size=columns)), dtype=np.uint8) & 15
    if draw(st.booleans()):
        few = np.array(draw(st.lists(st.integers(0, 15), min_size=1, max_size=3)), dtype=np.uint8)
        codes = few[codes % len(few)]
    base, spread = draw(st.integers(0, 252)), draw(st.sampled_from([0, 3, 6, 9, 12, 252]))
    offsets = draw(st.lists(st.integers(0, spread), min_size=columns // 32, max_size=columns // 32))
    scales = np.minimum(base + np.array(offsets), 252).astype(np.uint8)
    return Mxfp4Rows((codes[0::2] | codes[1::2] << 4)[None], scales[None])


def hostile_importance(columns: int = 256) -> st.SearchStrategy[F32Array | None]:
    """None, or weights of any size from zero to a million."""
    weight = st.one_of(st.just(0.0), st.floats(2.0**-20, 2.0**20, width=32))
    repeated = st.lists(weight, min_size=1, max_size=columns)
    return st.one_of(st.none(), repeated.map(lambda w: np.resize(np.array(w, dtype=np.float32), columns)))


def assert_all_paths_agree(
    rows: Rows, qtype: QuantType, importance: F32Array | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every instruction set that this machine has writes the bytes of the scalar code, and counts alike."""
    outputs = {}
    for isa in native.available_isas():
        monkeypatch.setenv(native.ISA_VARIABLE, isa)
        outputs[isa] = native.encode_with_stats(rows, qtype, importance)
    for data, stats in outputs.values():
        np.testing.assert_array_equal(data, outputs["scalar"][0])
        assert stats == outputs["scalar"][1]


def judged(data: U8Array, qtype: QuantType, columns: int) -> F32Array:
    """``data`` as libggml decodes it, after two other readers have agreed."""
    decoded = ggml.decode(data, qtype, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_allclose(gguf.quants.dequantize(data, qtype), decoded, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(libgguf.dequantize_rows(data, int(qtype), columns), decoded, rtol=2e-6, atol=1e-30)
    return decoded


def block_errors(data: U8Array, rows: Mxfp4Rows, qtype: QuantType, importance: F32Array | None = None) -> F64Array:
    """Sum of weight * error^2 of each block, [rows, blocks]."""
    values = mxfp4.decode(rows).astype(np.float64)
    squares = (ggml.decode(data, qtype, values.shape[1]) - values) ** 2
    if importance is not None:
        squares *= importance
    return squares.reshape(len(values), -1, block_size(qtype)).sum(axis=2)


def ggml_errors(rows: Mxfp4Rows, qtype: QuantType, importance: F32Array | None = None) -> F64Array:
    """The same for ggml's encoder; infinite in rows that it refuses."""
    errors = []
    for i in range(len(rows.packed)):
        row = Mxfp4Rows(rows.packed[i : i + 1], rows.scales[i : i + 1])
        try:
            errors.append(block_errors(ggml.encode(mxfp4.decode(row), qtype, importance), row, qtype, importance)[0])
        except ValueFault:
            errors.append(np.full(rows.packed.shape[1] * 2 // block_size(qtype), np.inf))
    return np.array(errors)
