"""The best types under a byte budget: a multiple-choice knapsack, solved the same way every time.

Each tensor has candidates of more bytes and less error. Steps from candidate to candidate along the lower convex hull
are taken in order of error saved per byte while they fit, which is optimal up to the last step. A search over partial
choices then closes the gap: it extends them tensor by tensor, largest first, and drops those that another one
dominates or whose lower bound (the same climb, with a fraction of the last step) is not better than what is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.errors import UsageError
from quant.types import QuantType

_PARTIAL_CHOICES = 512
_TOLERANCE = 1e-6

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible type of one tensor (or of one group of tensors that share a type).

    Attributes:
        tensor_name: name of the tensor or group.
        qtype: the type.
        nbytes: bytes that it takes.
        error: what it costs in the measure that is minimised; finite, not negative; sums over tensors.
    """

    tensor_name: str
    qtype: QuantType
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class _Step:
    """From one option of a group to the next on its hull: bytes more, error less."""

    group: int
    start: int
    end: int
    extra: int
    saved: float


def choose_types(candidates: Sequence[Candidate], budget: int) -> dict[str, QuantType]:
    """One type per tensor, so that the sum of errors is as small as can be found within ``budget`` bytes.

    The result depends on the set of candidates and the budget alone, not on their order.

    Args:
        candidates: at least one per tensor.
        budget: bytes for all tensors together.

    Raises:
        UsageError: the smallest candidates exceed the budget, or a candidate makes no sense.
    """
    groups = _useful(candidates)
    smallest = sum(options[0].nbytes for options in groups)
    if smallest > budget:
        raise UsageError(
            f"the smallest types take {smallest:,} bytes, more than the budget of {budget:,}",
            "raise the target size, or allow smaller types",
        )
    steps = _steps(groups)
    chosen = _climb(groups, steps, budget - smallest)
    known = sum(options[at].error for options, at in zip(groups, chosen, strict=True))
    chosen = _search(groups, steps, budget, known) or chosen
    return {options[at].tensor_name: options[at].qtype for options, at in zip(groups, chosen, strict=True)}


def _useful(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates by tensor, smallest first, each with less error than all smaller ones; tensors in order of name."""
    by_name: dict[str, dict[QuantType, Candidate]] = {}
    for candidate in candidates:
        if not (math.isfinite(candidate.error) and candidate.error >= 0 and candidate.nbytes > 0):
            raise UsageError(
                f"{candidate.tensor_name} as {candidate.qtype.name}: {candidate.nbytes} bytes, error {candidate.error}"
            )
        if by_name.setdefault(candidate.tensor_name, {}).setdefault(candidate.qtype, candidate) != candidate:
            raise UsageError(f"{candidate.tensor_name} has two candidates of type {candidate.qtype.name}")
    groups = []
    for _, options in sorted(by_name.items()):
        useful: list[Candidate] = []
        for option in sorted(options.values(), key=lambda c: (c.nbytes, c.error, int(c.qtype))):
            if not useful or option.error < useful[-1].error:
                useful.append(option)
        groups.append(useful)
    return groups


def _hull(options: Sequence[Candidate]) -> list[int]:
    """Indices of the options on the lower convex hull of error over bytes."""
    hull: list[int] = []
    for index, option in enumerate(options):
        while len(hull) > 1:
            a, b = options[hull[-2]], options[hull[-1]]
            # b lies on or above the line from a to the new option: leave it out.
            if (b.error - a.error) * (option.nbytes - a.nbytes) < (option.error - a.error) * (b.nbytes - a.nbytes):
                break
            hull.pop()
        hull.append(index)
    return hull


def _steps(groups: Sequence[Sequence[Candidate]]) -> list[_Step]:
    """Steps along the hulls of all groups, the most error saved per byte first."""
    steps = []
    for number, options in enumerate(groups):
        for a, b in itertools.pairwise(_hull(options)):
            extra = options[b].nbytes - options[a].nbytes
            steps.append(_Step(number, a, b, extra, options[a].error - options[b].error))
    return sorted(steps, key=lambda s: (-s.saved / s.extra, s.group, s.start))


def _climb(groups: Sequence[Sequence[Candidate]], steps: Sequence[_Step], left: int) -> list[int]:
    """Options reached by taking steps from the smallest while they fit into ``left`` bytes."""
    chosen = [0] * len(groups)
    for step in steps:
        if chosen[step.group] == step.start and step.extra <= left:
            left -= step.extra
            chosen[step.group] = step.end
    return chosen


def _search(
    groups: Sequence[Sequence[Candidate]], steps: Sequence[_Step], budget: int, known: float
) -> list[int] | None:
    """Options with less error in sum than ``known``, or None when the search finds none."""
    order = sorted(range(len(groups)), key=lambda g: (groups[g][0].nbytes - groups[g][-1].nbytes, g))
    place = {group: position for position, group in enumerate(order)}
    positions = np.array([place[step.group] for step in steps], dtype=np.int64)
    extra = np.array([step.extra for step in steps], dtype=np.float64)
    saved = np.array([step.saved for step in steps], dtype=np.float64)
    rest_bytes = sum(options[0].nbytes for options in groups)
    rest_error = sum(options[0].error for options in groups)
    used, error = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []
    for position, group in enumerate(order):
        options = groups[group]
        rest_bytes -= options[0].nbytes
        rest_error -= options[0].error
        later = positions > position
        reach = rest_bytes + np.concatenate([[0.0], np.cumsum(extra[later])])
        least = rest_error - np.concatenate([[0.0], np.cumsum(saved[later])])
        sizes = np.array([c.nbytes for c in options], dtype=np.int64)
        errors = np.array([c.error for c in options])
        used, error = (used[:, None] + sizes).ravel(), (error[:, None] + errors).ravel()
        bound = error + np.interp(budget - used, reach, least)
        kept = _keep(used, error, bound, (used <= budget - rest_bytes) & (bound < known * (1 - _TOLERANCE)))
        if kept.size == 0:
            return None
        used, error = used[kept], error[kept]
        trail.append((kept // len(options), kept % len(options)))
    chosen = [0] * len(groups)
    at = int(np.argmin(error))
    for group, (parents, taken) in zip(reversed(order), reversed(trail), strict=True):
        chosen[group] = int(taken[at])
        at = int(parents[at])
    return chosen


def _keep(used: Ints, error: Floats, bound: Floats, allowed: npt.NDArray[np.bool_]) -> Ints:
    """Indices of partial choices that no other one dominates; the most promising ones when they are too many."""
    index = np.flatnonzero(allowed)
    index = index[np.lexsort((error[index], used[index]))]
    if index.size == 0:
        return index
    before = np.concatenate([[np.inf], np.minimum.accumulate(error[index])[:-1]])
    index = index[error[index] < before]
    if index.size > _PARTIAL_CHOICES:
        index = np.sort(index[np.argsort(bound[index], kind="stable")[:_PARTIAL_CHOICES]])
    return index
