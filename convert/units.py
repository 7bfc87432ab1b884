"""How output tensors are cut into work units, and the number of each unit.

The cut depends on the tensors alone, never on threads or memory, because the journal and the read-back speak of
units by number. It is computed, not stored: the release has a quarter of a million units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from convert.domain import TensorSpec, WorkUnit
from convert.transforms import TRANSFORMS, expert_rows, row_count

MAX_UNIT_WEIGHTS = 16 << 20
USUAL_UNIT_WEIGHTS = 4 << 20


def _grid(spec: TensorSpec) -> tuple[int, int]:
    """(rows of a segment, rows of a unit): units are cut within segments, the last of each may be shorter."""
    columns = spec.shape[-1]
    quantum = TRANSFORMS[spec.transform].quantum(spec)
    rows = expert_rows(spec)
    usual = max(USUAL_UNIT_WEIGHTS // (columns * quantum), 1) * quantum
    if not spec.experts:
        return rows, usual
    if rows * columns > MAX_UNIT_WEIGHTS:
        return rows, usual
    return row_count(spec), max(USUAL_UNIT_WEIGHTS // (rows * columns), 1) * rows


class UnitTable:
    """The units of an ordered list of tensors.

    Args:
        specs: tensors in output order.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._rows = [row_count(spec) for spec in specs]
        self._grids = [_grid(spec) for spec in specs]
        counts = [
            rows // segment * -(-segment // step) for rows, (segment, step) in zip(self._rows, self._grids, strict=True)
        ]
        self._firsts = [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def of_tensor(self, tensor: int) -> range:
        """Numbers of the units of one tensor, in row order."""
        return range(self._firsts[tensor], self._firsts[tensor + 1])

    def tensor_of(self, number: int) -> int:
        """Index of the tensor that unit ``number`` is a part of."""
        return bisect_right(self._firsts, number) - 1

    def unit(self, number: int) -> WorkUnit:
        """The unit with this number."""
        tensor = self.tensor_of(number)
        segment, step = self._grids[tensor]
        index, part = divmod(number - self._firsts[tensor], -(-segment // step))
        begin = index * segment + part * step
        return WorkUnit(tensor, begin, min(begin + step, (index + 1) * segment))

    def __iter__(self) -> Iterator[WorkUnit]:
        return (self.unit(number) for number in range(len(self)))
