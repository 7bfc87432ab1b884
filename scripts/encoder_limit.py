"""How near the native encoders come to what Q4_K and Q2_K can hold, on a sample of super-blocks.

For each super-block all scales and minima that the format's indices can name are tried in every sub-block, under 512
pairs of ``d`` and ``dmin`` around the encoder's own, that one among them. What remains above the optimum with free
scales (``encoder_optimum.py``) is then the price of the format, not of the search. Weights are those of
``bench_encoders.py``.

    python scripts/encoder_limit.py [--rows 2] [--types Q4_K,Q2_K]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_encoders import SIGMAS, DataSet, synthetic, weighted_error
from encoder_optimum import FORMATS, LEVELS, histograms, optimum

from quant import native
from quant.tensors import F32Array, Mxfp4Rows, U8Array
from quant.types import QuantType, block_bytes, parse_type

F64 = npt.NDArray[np.float64]
INDICES = {QuantType.Q4_K: 64, QuantType.Q2_K: 16}
D_OFFSET = {QuantType.Q4_K: 0, QuantType.Q2_K: 80}
AROUND_D = np.append(np.geomspace(0.8, 1.25, 31), 1.0)
AROUND_DMIN = np.append(np.geomspace(0.8, 1.25, 15), 1.0)


def best_under(d: float, dmin: float, qtype: QuantType, sums: F64, units: F64) -> float:
    """Least error of a super-block under ``d`` and ``dmin``: the best indices of each sub-block, found one by one.

    Args:
        sums: weight of each code, [sub-blocks, 16].
        units: value of one level, [sub-blocks].
    """
    form, indices = FORMATS[qtype], np.arange(INDICES[qtype])
    total = 0.0
    for unit in np.unique(units):
        scales, minima = d * indices[1:, None, None], dmin * indices[None, :, None]
        values = LEVELS * unit
        quants = np.clip(np.rint((values + minima) / scales), form.low, form.high)
        squares = ((scales * quants - minima - values) ** 2).reshape(-1, 16)
        flat = ((np.minimum(-dmin * indices[:, None], 0.0) - values) ** 2).reshape(-1, 16)
        own = sums[units == unit]
        total += float(np.minimum((squares @ own.T).min(axis=0), (flat @ own.T).min(axis=0)).sum())
    return total


def limit(rows: Mxfp4Rows, encoded: U8Array, qtype: QuantType, importance: F32Array | None) -> float:
    """Sum over the super-blocks of ``rows`` of the least error found."""
    per = 256 // FORMATS[qtype].size
    sums, squared_units = histograms(rows, FORMATS[qtype].size, importance)
    blocks = encoded.reshape(-1, block_bytes(qtype))
    offset = D_OFFSET[qtype]
    pairs = blocks[:, offset : offset + 4].copy().view("<f2").astype(np.float64)
    total = 0.0
    for number, (d, dmin) in enumerate(pairs):
        part = slice(number * per, (number + 1) * per)
        best = np.inf
        for factor in AROUND_D:
            for other in AROUND_DMIN:
                tried = np.float64(np.float16(d * factor)), np.float64(np.float16(dmin * other))
                best = min(best, best_under(*tried, qtype, sums[part], np.sqrt(squared_units[part])))
        total += best
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2, help="of each kind of weights (default 2)")
    parser.add_argument("--types", default="Q4_K,Q2_K")
    options = parser.parse_args()
    for qtype in map(parse_type, options.types.split(",")):
        for data in synthetic(1):
            if not data.name.endswith("3584"):
                continue
            rows = Mxfp4Rows(data.rows.packed[: options.rows], data.rows.scales[: options.rows])
            sample = DataSet(data.name, rows, data.values[: options.rows], data.importance)
            for sigma in (None, *SIGMAS):
                importance = data.importance[sigma]
                encoded = native.encode(rows, qtype, importance)
                free = optimum(rows, qtype, importance)
                ours = weighted_error(encoded, sample, qtype, importance) / free
                least = limit(rows, encoded, qtype, importance) / free
                print(
                    f"{qtype.name} {data.name}, {'equal weights' if sigma is None else f'sigma {sigma}'}: over free "
                    f"scales ours {ours - 1:.2%}, the format {least - 1:.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
