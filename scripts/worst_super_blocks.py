"""Looks for super-blocks on which the native encoders lose more than ggml's: the ratio of the two errors, one by one.

Weights as in ``bench_encoders.py``, codes drawn at random, and codes of which four in five are zero; equal weights, and
importance drawn log-normally, anew for every eight rows. Error is the sum of weight * error^2 in double precision of
what libggml decodes. Super-blocks that both encoders leave without error count as equal.

    python scripts/worst_super_blocks.py [--rows 608] [--types Q4_K,Q3_K,Q2_K]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quant import ggml, mxfp4, native
from quant.tensors import F32Array, Mxfp4Rows
from quant.types import QuantType, parse_type

COLUMNS = 3584
ROWS_AT_ONCE = 8
SIGMAS = (0.0, 0.7, 1.5, 2.0, 2.5, 4.0)
KINDS = ("gauss floor", "gauss ceil", "t5 floor", "t5 ceil", "random", "sparse")
F64 = npt.NDArray[np.float64]


def rows_of(kind: str, rng: np.random.Generator) -> Mxfp4Rows:
    shape = (ROWS_AT_ONCE, COLUMNS)
    family, _, rule = kind.partition(" ")
    if rule:
        raw = rng.standard_normal(shape) if family == "gauss" else rng.standard_t(5, shape)
        spread = np.exp(0.3 * rng.standard_normal((ROWS_AT_ONCE, 1)))
        return mxfp4.quantize((0.02 * spread * raw).astype(np.float32), rule)  # type: ignore[arg-type]
    packed = rng.integers(0, 256, (ROWS_AT_ONCE, COLUMNS // 2), dtype=np.uint8)
    if kind == "sparse":
        packed *= rng.random(packed.shape) < 0.2
    scales = rng.integers(120, 126 if kind == "sparse" else 123, (ROWS_AT_ONCE, COLUMNS // 32), dtype=np.uint8)
    return Mxfp4Rows(packed, scales)


def errors(data: npt.NDArray[np.uint8], qtype: QuantType, values: F32Array, importance: F32Array | None) -> F64:
    """Of each super-block."""
    squares = (ggml.decode(data, qtype, COLUMNS).astype(np.float64) - values) ** 2
    weighted = squares if importance is None else squares * importance
    return weighted.reshape(-1, 256).sum(axis=1)


def ratios(kind: str, sigma: float, qtype: QuantType, rows: int) -> Iterator[tuple[F64, F64]]:
    """Errors of both encoders for some rows after another."""
    rng = np.random.default_rng([KINDS.index(kind), int(10 * sigma)])
    for _ in range(0, rows, ROWS_AT_ONCE):
        codes = rows_of(kind, rng)
        importance = np.exp(sigma * rng.standard_normal(COLUMNS)).astype(np.float32) if sigma else None
        values = mxfp4.decode(codes)
        ours = native.encode(codes, qtype, importance)
        theirs = ggml.encode(values, qtype, importance)
        yield errors(ours, qtype, values, importance), errors(theirs, qtype, values, importance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=608, help="of each kind and sigma (default 608)")
    parser.add_argument("--types", default="Q4_K,Q3_K,Q2_K")
    options = parser.parse_args()
    for qtype in map(parse_type, options.types.split(",")):
        count, worst = 0, 0.0
        for kind in KINDS:
            for sigma in SIGMAS:
                pairs = list(ratios(kind, sigma, qtype, options.rows))
                ours, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratio = np.where(ours == theirs, 1.0, ours / theirs)
                print(
                    f"{qtype.name} {kind:12} sigma {sigma}: {ratio.size} super-blocks, in sum "
                    f"{ours.sum() / theirs.sum():.4f}, worst {ratio.max():.4f}, {(ratio > 1).sum()} above 1, "
                    f"{(ratio > 1.05).sum()} above 1.05"
                )
                count, worst = count + ratio.size, max(worst, float(ratio.max()))
        print(f"{qtype.name}: {count} super-blocks, worst {worst:.4f}")


if __name__ == "__main__":
    main()
