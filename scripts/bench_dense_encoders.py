"""Error and speed of the native encoders from BF16 as ratios to ggml's, both in this process, one thread.

Data: Gaussian and Student-t(5) weights in rows of 3584, rounded to BF16; equal weights, and importance of the columns
drawn log-normally. The two sides take turns, time is the thread's own, and the best of several turns counts; ggml's
side is given float32, so that its time holds no conversion.

    python scripts/bench_dense_encoders.py [--turns 3] [--rows 96] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_encoders import SIGMAS, seconds, with_isa

from quant import ggml, native
from quant.tensors import Bf16Rows, F32Array, U8Array
from quant.types import QuantType

COLUMNS = 3584
TIMED_ROWS = 19
TYPES = (QuantType.Q6_K, QuantType.Q5_K, QuantType.Q4_K, QuantType.Q3_K, QuantType.Q2_K)


def weights(family: str, rows: int) -> tuple[Bf16Rows, F32Array]:
    """The bits and their values."""
    rng = np.random.default_rng(family == "t5")
    raw = rng.standard_normal((rows, COLUMNS)) if family == "gauss" else rng.standard_t(5, (rows, COLUMNS))
    bits = ((0.02 * raw).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Bf16Rows(bits), (bits.astype(np.uint32) << 16).view(np.float32)


def errors(data: U8Array, qtype: QuantType, values: F32Array, importance: F32Array | None) -> npt.NDArray[np.float64]:
    """Sum of weight * error^2 of each super-block."""
    squares = (ggml.decode(data, qtype, COLUMNS).astype(np.float64) - values) ** 2
    weighted = squares if importance is None else squares * importance
    return weighted.reshape(-1, 256).sum(axis=1)


def measure(family: str, sigma: float | None, qtype: QuantType, rows: int, turns: int) -> dict[str, float]:
    bits, values = weights(family, rows)
    rng = np.random.default_rng(1)
    importance = None if sigma is None else np.exp(sigma * rng.standard_normal(COLUMNS)).astype(np.float32)
    ours = errors(native.encode(bits, qtype, importance), qtype, values, importance)
    theirs = errors(ggml.encode(values, qtype, importance), qtype, values, importance)
    few, few_values = Bf16Rows(bits.bits[:TIMED_ROWS]), values[:TIMED_ROWS]
    isas = native.available_isas()
    best = dict.fromkeys(("ggml", *isas), float("inf"))
    for _ in range(turns):
        best["ggml"] = min(best["ggml"], seconds(lambda: ggml.encode(few_values, qtype, importance), time.thread_time))
        for isa in isas:
            run = with_isa(isa, lambda: native.encode(few, qtype, importance))
            best[isa] = min(best[isa], seconds(run, time.thread_time))
    os.environ.pop(native.ISA_VARIABLE, None)
    result = {"error": float(ours.sum() / theirs.sum()), "worst": float((ours / theirs).max())}
    result["ns"] = best[isas[0]] / few_values.size * 1e9
    return result | {isa: best["ggml"] / best[isa] for isa in isas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    found = {}
    for qtype in TYPES:
        for sigma in (None, *SIGMAS):
            for family in ("gauss", "t5"):
                result = measure(family, sigma, qtype, options.rows, options.turns)
                kind = "equal weights" if sigma is None else f"importance {sigma}"
                speeds = ", ".join(f"{isa} {result[isa]:.1f} x" for isa in native.available_isas())
                print(
                    f"{qtype.name} {family:5} {kind:14}: error {result['error']:.3f} of ggml's, worst super-block "
                    f"{result['worst']:.3f}; speed {speeds} ({result['ns']:.1f} ns a weight)",
                    flush=True,
                )
                found[f"{qtype.name} {family} {sigma}"] = result
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
