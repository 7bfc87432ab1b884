"""Means with standard errors, quantiles, and the evenness of a load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kimi_gguf.verify.result import Estimate, Histogram, KlQuantiles, Load

F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]

CHUNKS_FOR_ERRORS = 8
"""From so many chunks on, errors come from the spread of chunks: tokens of one text are not independent."""

KL_EDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-16, 5))
"""Half decades from 1e-8 to 100 nats."""


def estimate(sums: F64Array, squares: F64Array, counts: I64Array) -> Estimate | None:
    """The mean of samples that come in chunks; None without samples.

    With 8 chunks or more the error is that of a ratio of sums over chunks (chunks may differ in length); with fewer
    it is the standard deviation of tokens over the root of their number.

    Args:
        sums, squares: F64 [chunks], sums of values and of their squares; counts: I64 [chunks], samples.
    """
    seen = counts > 0
    sums, squares, counts = sums[seen], squares[seen], counts[seen]
    total, chunks = int(counts.sum()), len(counts)
    if total == 0:
        return None
    value = float(sums.sum() / total)
    if chunks >= CHUNKS_FOR_ERRORS:
        spread = float(np.square(sums - value * counts).sum())
        return Estimate(value, math.sqrt(chunks / (chunks - 1) * spread) / total, "chunks", chunks)
    if total == 1:
        return Estimate(value, None, "tokens", 1)
    variance = max(float(squares.sum()) / total - value * value, 0.0)
    # A constant's variance is 0, which the difference of two rounded sums may miss.
    if variance < 1e-15 * value * value:
        variance = 0.0
    return Estimate(value, math.sqrt(variance / (total - 1)), "tokens", total)


def estimate_tokens(values: F64Array, chunk_of: I64Array, chunks: int) -> Estimate | None:
    """``estimate`` of per-token values, NaN where there is none.

    Args:
        values: F64 [n]; chunk_of: I64 [n], the chunk of each.
    """
    known = ~np.isnan(values)
    values, chunk_of = values[known], chunk_of[known]
    sums: F64Array = np.bincount(chunk_of, weights=values, minlength=chunks).astype(np.float64)
    squares: F64Array = np.bincount(chunk_of, weights=np.square(values), minlength=chunks).astype(np.float64)
    return estimate(sums, squares, np.bincount(chunk_of, minlength=chunks))


def transformed(base: Estimate, value: float, slope: float) -> Estimate:
    """The estimate of a function of a mean: its value, and the error times the function's slope there."""
    return Estimate(value, None if base.error is None else base.error * abs(slope), base.over, base.count)


def quantile(ordered: F64Array, share: float) -> Estimate:
    """The quantile of sorted samples; its error is half the distance of the ranks one standard deviation away.

    The error is None where those ranks would lie outside the samples.
    """
    n = len(ordered)
    rank = share * (n - 1)
    spread = math.sqrt(n * share * (1 - share))
    low, high = rank - spread, rank + spread
    error = None
    if low >= 0 and high <= n - 1:
        error = float(np.interp(high, np.arange(n), ordered) - np.interp(low, np.arange(n), ordered)) / 2
    return Estimate(float(np.interp(rank, np.arange(n), ordered)), error, "tokens", n)


def kl_quantiles(values: F64Array) -> KlQuantiles:
    """Median, 90, 99 and 99.9 % of per-token divergences."""
    ordered = np.sort(values)
    return KlQuantiles(*(quantile(ordered, share) for share in (0.5, 0.9, 0.99, 0.999)))


def histogram(values: F64Array, edges: Sequence[float] = KL_EDGES) -> Histogram:
    """Counts of values between ``edges``."""
    counts, _ = np.histogram(values, bins=np.array([*edges, np.inf]))
    return Histogram(
        edges=tuple(edges),
        counts=tuple(int(c) for c in counts[:-1]),
        below=int((values < edges[0]).sum()),
        above=int(counts[-1]),
    )


def load(counts: I64Array) -> Load:
    """How evenly tokens reach experts, from tokens per expert."""
    ordered = np.sort(counts).astype(np.float64)
    n, total = len(ordered), float(ordered.sum())
    # Gini's coefficient of sorted x: sum_i (2 i - n + 1) x_i / (n sum x), i from 0.
    weight = 2 * np.arange(n) - n + 1
    gini = float((weight * ordered).sum() / (n * total)) if total else 0.0
    used = int(np.count_nonzero(counts))
    return Load(tuple(int(c) for c in counts), used, n - used, gini)
