"""Types under a byte budget: never above it, as good as trying everything, the same every time."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from quant.budget import Candidate, choose_types
from quant.errors import UsageError
from quant.types import QuantType

Q = QuantType
BYTES = {Q.Q2_K: 84, Q.Q3_K: 110, Q.Q4_K: 144, Q.Q5_K: 176, Q.Q6_K: 210}


def problem(seed: int, tensors: int) -> list[list[Candidate]]:
    """Tensors of very different sizes and sensitivities; error falls with bytes, not quite evenly."""
    rng = random.Random(seed)
    groups = []
    for number in range(tensors):
        size, weight = rng.choice([1, 2, 5, 20]), rng.random() ** 3
        groups.append(
            [
                Candidate(f"t{number}", t, b * size, size * weight * 2 ** (-b / 25) * (1 + 0.2 * rng.random()))
                for t, b in BYTES.items()
            ]
        )
    return groups


def totals(groups: list[list[Candidate]], chosen: dict[str, QuantType]) -> tuple[int, float]:
    picked = [c for group in groups for c in group if chosen[c.tensor_name] is c.qtype]
    assert len(picked) == len(groups)
    return sum(c.nbytes for c in picked), sum(c.error for c in picked)


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_the_best_of_all_within_the_budget(seed: int) -> None:
    groups = problem(seed, 1 + seed % 5)
    low, high = (sum(pick(c.nbytes for c in g) for g in groups) for pick in (min, max))
    budget = random.Random(-seed).randint(low, high)
    nbytes, error = totals(groups, choose_types([c for g in groups for c in g], budget))
    fitting = (
        sum(c.error for c in combination)
        for combination in itertools.product(*groups)
        if sum(c.nbytes for c in combination) <= budget
    )
    assert nbytes <= budget
    assert error == pytest.approx(min(fitting), rel=2e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_for_many_tensors_is_that_of_an_exact_program(seed: int) -> None:
    """The least error for each number of bytes, tensor by tensor."""
    groups = problem(100 + seed, 40)
    low, high = (sum(pick(c.nbytes for c in g) for g in groups) for pick in (min, max))
    budget = low + (high - low) * (seed + 1) // 5
    least = np.concatenate([[0.0], np.full(budget, np.inf)])
    for group in groups:
        longer = np.full(budget + 1, np.inf)
        for c in group:
            longer[c.nbytes :] = np.minimum(longer[c.nbytes :], least[: budget + 1 - c.nbytes] + c.error)
        least = longer
    nbytes, error = totals(groups, choose_types([c for g in groups for c in g], budget))
    assert nbytes <= budget
    assert error == pytest.approx(least.min(), rel=2e-6)


def test_the_order_of_the_candidates_does_not_matter() -> None:
    candidates = [c for g in problem(7, 40) for c in g]
    shuffled = random.Random(0).sample(candidates, len(candidates))
    assert choose_types(candidates, 40_000) == choose_types(shuffled, 40_000)


def test_more_bytes_never_give_more_error() -> None:
    groups = problem(3, 30)
    candidates = [c for g in groups for c in g]
    low, high = (sum(pick(c.nbytes for c in g) for g in groups) for pick in (min, max))
    errors = [totals(groups, choose_types(candidates, low + (high - low) * i // 8))[1] for i in range(9)]
    assert all(b <= a * (1 + 2e-6) for a, b in itertools.pairwise(errors))


def test_a_type_that_is_larger_and_no_better_is_never_chosen() -> None:
    candidates = [Candidate("t", Q.Q4_K, 10, 1.0), Candidate("t", Q.Q5_0, 12, 1.0), Candidate("t", Q.Q5_1, 14, 2.0)]
    assert choose_types(candidates, 100) == {"t": Q.Q4_K}


def test_no_tensors_need_no_bytes() -> None:
    assert choose_types([], 0) == {}


def test_a_budget_below_the_smallest_types_names_both_numbers() -> None:
    with pytest.raises(UsageError, match="the smallest types take 84 bytes, more than the budget of 83"):
        choose_types([Candidate("t", Q.Q2_K, 84, 1.0)], 83)


@pytest.mark.parametrize(("nbytes", "error"), [(0, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_candidates_that_make_no_sense_are_refused(nbytes: int, error: float) -> None:
    with pytest.raises(UsageError, match="t as Q4_K"):
        choose_types([Candidate("t", Q.Q4_K, nbytes, error)], 100)


def test_two_candidates_of_one_type_are_refused() -> None:
    with pytest.raises(UsageError, match="t has two candidates of type Q4_K"):
        choose_types([Candidate("t", Q.Q4_K, 1, 1.0), Candidate("t", Q.Q4_K, 2, 1.0)], 100)
