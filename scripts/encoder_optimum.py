"""How little error a scale, or a scale and a minimum, per sub-block can leave: the floor for the searched formats.

Scales and minima are real numbers here, one pair for each sub-block, free of the super-block's 4 or 6 bits. The error
of a sub-block depends on the roundings of the 15 levels alone, so every rounding that some lattice yields is listed
once, and each is fitted by least squares to the sub-block's histogram.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.tensors import Mxfp4Rows
from quant.types import QuantType

F64 = npt.NDArray[np.float64]

# Doubled values of codes 0..15, as the kernels count them.
LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float64)
_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Format:
    """Weights in a sub-block, smallest and largest quant, and whether a minimum >= 0 is subtracted."""

    size: int
    low: int
    high: int
    minimum: bool


FORMATS = {
    QuantType.Q4_K: Format(32, 0, 15, True),
    QuantType.Q3_K: Format(16, -4, 3, False),
    QuantType.Q2_K: Format(16, 0, 3, True),
}


def roundings(form: Format) -> F64:
    """All distinct roundings of the levels, [n, 16], by a fine grid of densities and offsets."""
    densities = np.geomspace(0.03, form.high - form.low + 1.0, 500)
    offsets = np.arange(0, form.high + 1.0, 0.05) if form.minimum else np.zeros(1)
    signs = (1.0,) if form.minimum else (1.0, -1.0)
    found = [
        np.clip(np.rint(sign * density * LEVELS + offsets[:, None]), form.low, form.high)
        for density in densities
        for sign in signs
    ]
    return np.unique(np.concatenate(found).astype(np.int8), axis=0).astype(np.float64)


def histograms(rows: Mxfp4Rows, size: int, importance: F64 | None) -> tuple[F64, F64]:
    """Weight of each code in each sub-block, [n, 16], and the squared unit of each sub-block's values, [n]."""
    count, half = rows.packed.shape
    codes = np.stack([rows.packed & 15, rows.packed >> 4], axis=2).reshape(-1, size).astype(np.int64)
    weights = np.ones(half * 2) if importance is None else importance
    weights = np.broadcast_to(weights, (count, half * 2)).reshape(-1, size)
    flat = codes + 16 * np.arange(codes.shape[0])[:, None]
    sums = np.bincount(flat.ravel(), weights.ravel(), 16 * codes.shape[0]).reshape(-1, 16)
    units = np.ldexp(1.0, rows.scales.astype(np.int64) - 128)
    return sums, np.repeat(units.ravel() ** 2, 32 // size)


def optimum(rows: Mxfp4Rows, qtype: QuantType, importance: F64 | None = None) -> float:
    """Least possible sum of weight * error^2 over ``rows`` with free scales and minima."""
    form = FORMATS[qtype]
    sums, units = histograms(rows, form.size, importance)
    total, first, second = sums.sum(1)[:, None], (sums @ LEVELS)[:, None], (sums @ LEVELS**2)[:, None]
    best = np.full(sums.shape[0], np.inf)
    table = roundings(form)
    for begin in range(0, len(table), _CHUNK):
        q = table[begin : begin + _CHUNK].T
        wq, wqq, wqt = sums @ q, sums @ (q * q), sums @ (q * LEVELS[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            explained = np.where(wqq > 0, wqt**2 / wqq, 0.0)
            if form.minimum:
                determinant = total * wqq - wq**2
                scale = (total * wqt - wq * first) / determinant
                low = (wqq * first - wq * wqt) / determinant
                both = scale * wqt + low * first
                explained = np.where((determinant > 1e-9) & (low <= 0), both, explained)
        best = np.minimum(best, (second - explained).min(axis=1))
    return float((np.maximum(best, 0.0) * units).sum())
