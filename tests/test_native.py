"""The door to the encoder library: what it supports, which instruction set it takes, what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from encoder_samples import one_row, random_rows

from quant import mxfp4, native
from quant.errors import InputError, UsageError, ValueFault
from quant.native import EncodeStats
from quant.tensors import Mxfp4Rows
from quant.types import QuantType, row_bytes

Q = QuantType


def test_mxfp4_sources_only_and_no_iq_types() -> None:
    assert all(native.supports("MXFP4", t) for t in (Q.MXFP4, Q.Q8_0, Q.Q6_K, Q.Q5_K, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1))
    assert not native.supports("BF16", Q.Q8_0) and native.supports("F32", Q.Q6_K)
    assert not native.supports("MXFP4", Q.IQ4_XS)
    with pytest.raises(UsageError, match="IQ4_XS"):
        native.encode(random_rows(0, 1, 256), Q.IQ4_XS)


def test_shape_and_statistics() -> None:
    data, stats = native.encode_with_stats(random_rows(0, 3, 512), Q.Q6_K)
    assert data.shape == (3, row_bytes(Q.Q6_K, 512)) and data.dtype == np.uint8
    assert stats == EncodeStats(blocks=6, exact=6, clipped=0)
    assert stats + EncodeStats(1, 0, 1) == EncodeStats(7, 6, 1)


def test_no_rows_are_no_bytes() -> None:
    data, stats = native.encode_with_stats(random_rows(0, 0, 512), Q.Q5_K)
    assert data.shape == (0, row_bytes(Q.Q5_K, 512)) and stats == EncodeStats()


def test_encoding_into_a_buffer_of_the_caller() -> None:
    rows = random_rows(1, 4, 256)
    out = np.zeros((4, row_bytes(Q.Q8_0, 256)), np.uint8)
    native.encode_into(rows, Q.Q8_0, out)
    np.testing.assert_array_equal(out, native.encode(rows, Q.Q8_0))
    with pytest.raises(UsageError, match="contiguous"):
        native.encode_into(rows, Q.Q8_0, np.zeros((4, 2 * out.shape[1]), np.uint8)[:, ::2])
    with pytest.raises(UsageError, match="shape"):
        native.encode_into(rows, Q.Q8_0, out[:3])


def test_rows_that_are_slices_of_larger_arrays() -> None:
    rows = random_rows(2, 8, 512)
    slices = Mxfp4Rows(rows.packed[1::2, :128], rows.scales[1::2, :8])
    copies = Mxfp4Rows(slices.packed.copy(), slices.scales.copy())
    np.testing.assert_array_equal(native.encode(slices, Q.Q6_K), native.encode(copies, Q.Q6_K))


def test_threads_do_not_change_bytes() -> None:
    rows = random_rows(3, 64, 512, (0, 252))
    whole = native.encode(rows, Q.Q5_K)
    parts = [Mxfp4Rows(rows.packed[i : i + 8], rows.scales[i : i + 8]) for i in range(0, 64, 8)]
    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_array_equal(np.concatenate(list(pool.map(lambda r: native.encode(r, Q.Q5_K), parts))), whole)


@pytest.mark.parametrize("isa", native.available_isas())
def test_an_instruction_set_can_be_forced(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert native.current_isa() == isa


def test_the_best_available_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    assert native.current_isa() == native.available_isas()[0] and native.available_isas()[-1] == "scalar"


@pytest.mark.parametrize(("isa", "problem"), [("sse9", "no such"), ("neon", "cannot"), ("avx512", "cannot")])
def test_an_instruction_set_that_is_not_there_is_refused(
    isa: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "available_isas", lambda: ("avx2", "scalar"))
    native._resolve_isa.cache_clear()
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    with pytest.raises(UsageError, match=f"{isa}: .*{problem}.*\n.*avx2, scalar"):
        native.encode(random_rows(0, 1, 256), Q.Q6_K)
    native._resolve_isa.cache_clear()


@pytest.mark.parametrize(("scale", "code"), [(255, 0), (254, 4), (253, 6)])
@pytest.mark.parametrize("qtype", [Q.MXFP4, Q.Q8_0, Q.Q6_K, Q.Q4_0], ids=lambda t: t.name)
def test_scales_that_no_float_has_are_refused_with_their_row(qtype: QuantType, scale: int, code: int) -> None:
    rows = random_rows(0, 3, 256)
    rows.packed[2, 64:80] = code << 4
    rows.scales[2, 4] = scale
    with pytest.raises(ValueFault, match=f"scale byte {scale} of columns 128 to 159") as caught:
        native.encode(rows, qtype)
    assert caught.value.row == 2


@pytest.mark.parametrize("scale", [253, 254])
def test_large_scales_with_small_codes_are_numbers(scale: int) -> None:
    rows = one_row([0, 1, 2, 3, 9, 10, 11, 8], [scale] * 8)
    np.testing.assert_array_equal(native.encode(rows, Q.MXFP4), mxfp4.repack(rows))


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="288"):
        native.encode(random_rows(0, 1, 288), Q.Q6_K)
    with pytest.raises(UsageError, match="do not fit"):
        native.encode(Mxfp4Rows(np.zeros((2, 128), np.uint8), np.zeros((2, 7), np.uint8)), Q.Q6_K)
    with pytest.raises(UsageError, match="U8"):
        native.encode(Mxfp4Rows(np.zeros((2, 128), np.int16), np.zeros((2, 8), np.uint8)), Q.Q6_K)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_importance_must_be_finite_not_negative_and_fit(bad: float) -> None:
    importance = np.ones(256, np.float32)
    importance[9] = bad
    with pytest.raises(InputError, match="importance"):
        native.encode(random_rows(0, 1, 256), Q.Q4_0, importance)
    with pytest.raises(InputError, match="128"):
        native.encode(random_rows(0, 1, 256), Q.Q4_0, np.ones(128, np.float32))


def test_a_missing_library_is_one_sentence() -> None:
    program = (
        "from quant import kernels, native\n"
        "kernels.LIBRARY = 'nowhere.so'\n"
        "from quant.errors import InputError\n"
        "try:\n    native.available_isas()\n"
        "except InputError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert "nowhere.so cannot be loaded" in done.stdout and "build_kernels.sh" in done.stdout
