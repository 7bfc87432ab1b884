"""Units cover every row once and hold at most 16 Mi weights."""

from __future__ import annotations

import itertools
import math

import pytest

from convert.domain import TensorSpec
from convert.units import MAX_UNIT_WEIGHTS, UnitTable
from quant.tensors import TensorClass


def spec(shape: tuple[int, ...], transform: str = "copy", experts: int = 0) -> TensorSpec:
    return TensorSpec("t", shape, TensorClass.NORM, None, ("s",), transform, "BF16", experts)


CASES = [
    spec((7,)),
    spec((163840, 7168)),
    spec((3, 5)),
    spec((896, 3072, 3584), "packed_experts", 896),
    spec((896, 16, 32), "packed_experts", 896),
    spec((4, 8192, 4096), "packed_experts", 4),
    spec((96, 512, 128), "head_keys"),
    spec((96, 128, 512), "head_values"),
    spec((1, 12288, 1, 4)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda s: f"{s.transform} {s.shape}")
def test_units_cover_each_row_once(case: TensorSpec) -> None:
    table = UnitTable([spec((9, 9)), case, spec((2, 2))])
    units = [table.unit(n) for n in table.of_tensor(1)]
    assert all(unit.tensor == 1 for unit in units)
    assert units[0].row_begin == 0
    assert units[-1].row_end == math.prod(case.shape[:-1])
    assert all(a.row_end == b.row_begin for a, b in itertools.pairwise(units))
    assert max((u.row_end - u.row_begin) * case.shape[-1] for u in units) <= MAX_UNIT_WEIGHTS


def test_one_real_expert_is_one_unit() -> None:
    table = UnitTable([CASES[3]])
    assert len(table) == 896
    assert (table.unit(5).row_begin, table.unit(5).row_end) == (5 * 3072, 6 * 3072)


def test_small_experts_share_a_unit_and_large_ones_are_cut() -> None:
    assert len(UnitTable([CASES[4]])) == 1
    table = UnitTable([CASES[5]])
    assert {unit.row_begin // 8192 for unit in table} == {0, 1, 2, 3}
    assert all((unit.row_end - 1) // 8192 == unit.row_begin // 8192 for unit in table)


def test_heads_are_not_cut() -> None:
    large = spec((96, 5120, 1280), "head_keys")
    assert all(unit.row_begin % 5120 == 0 for unit in UnitTable([large]))


def test_numbers_find_their_tensor() -> None:
    table = UnitTable(CASES)
    for index in range(len(CASES)):
        assert {table.tensor_of(number) for number in table.of_tensor(index)} == {index}
    assert len(table) == table.of_tensor(len(CASES) - 1).stop
