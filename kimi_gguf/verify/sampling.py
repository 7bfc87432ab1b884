"""Which rows of a tensor a check reads: all, or a share spread over all experts and chosen by a seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from convert.domain import TensorSpec
from convert.transforms import TRANSFORMS, expert_rows, row_count

DEFAULT_SHARE = 0.01
WHOLE_BELOW = 1 << 16
"""Tensors of up to so many weights, stacks excepted, are always read whole: norms, states, biases, convolutions."""
_RUN = 8


def parse_share(text: str | float) -> float:
    """The share that ``1%``, ``0.5 %`` or a number of per cent stands for.

    Raises:
        ValueError: no number above 0 and up to 100.
    """
    percent = float(text.strip().removesuffix("%")) if isinstance(text, str) else float(text)
    if not 0 < percent <= 100:
        raise ValueError(text)
    return percent / 100


SPOTS = 4
"""Runs of rows that are read of a tensor where every run is a request to the Hub."""


def sample_spots(spec: TensorSpec, share: float, seed: int) -> list[tuple[int, int]]:
    """Some of the ranges of ``sample_rows``, in order: so few that a tensor far away can be looked at."""
    ranges = list(sample_rows(spec, share, seed))
    if len(ranges) <= SPOTS:
        return ranges
    random = np.random.default_rng([seed, zlib.crc32(spec.name.encode()), SPOTS])
    return [ranges[i] for i in sorted(random.choice(len(ranges), SPOTS, replace=False).tolist())]


def sample_rows(spec: TensorSpec, share: float, seed: int) -> Iterator[tuple[int, int]]:
    """Ascending ranges [begin, end) of rows that make up ``share`` of a tensor; at least one row of every expert.

    Ranges are short runs, one from each of as many equal parts of the matrix, so that nothing larger than a part
    escapes. They depend on the tensor's name and ``seed`` alone.
    """
    rows = row_count(spec)
    if share >= 1 or (not spec.experts and math.prod(spec.shape) <= WHOLE_BELOW):
        yield 0, rows
        return
    quantum = TRANSFORMS[spec.transform].quantum(spec)
    section = expert_rows(spec) // quantum
    picked = max(1, round(section * share))
    parts = -(-picked // _RUN)
    run = -(-picked // parts)
    random = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    bounds = np.arange(parts + 1) * section // parts
    room = np.maximum(np.diff(bounds) - run, 0)
    for first in range(0, rows // quantum, section):
        begins = first + bounds[:-1] + random.integers(0, room + 1)
        ends = np.minimum(begins + run, first + bounds[1:])
        yield from zip((begins * quantum).tolist(), (ends * quantum).tolist(), strict=True)
