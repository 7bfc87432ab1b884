"""Types chosen tensor by tensor, folded to a row per kind of tensor and type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from convert.domain import PlannedTensor
from convert.plan import recipe_tensors
from kimi_gguf.console import table
from quant.recipe_file import layer_ranges
from quant.recipe_rules import quantizable

_LAYER = re.compile(r"^blk\.(\d+)\.")
_LONGEST_RANGES = 44


@dataclass(frozen=True, slots=True)
class TypeRow:
    """The tensors of one kind that have one type.

    Attributes:
        pattern: ``blk.*.ffn_down_exps.weight``; the name of a global tensor.
        type: of these tensors.
        layers: their layers as numbers and ranges, empty for a global tensor.
        count, nbytes: how many, and their bytes.
        of: tensors of this kind, of any type.
    """

    pattern: str
    type: str
    layers: str
    count: int
    of: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "tensors": self.pattern,
            "type": self.type,
            "layers": self.layers,
            "count": self.count,
            "of": self.of,
            "bytes": self.nbytes,
        }


def type_rows(tensors: Iterable[PlannedTensor]) -> tuple[TypeRow, ...]:
    """A row per kind of tensor and type, most bytes first; without what is F32 in every file."""
    planned = list(tensors)
    kinds: dict[str, dict[str, list[PlannedTensor]]] = {}
    for tensor, seen in zip(planned, recipe_tensors([t.spec for t in planned]), strict=True):
        if quantizable(seen):
            pattern = _LAYER.sub("blk.*.", tensor.spec.name)
            kinds.setdefault(pattern, {}).setdefault(tensor.qtype.name, []).append(tensor)
    rows = []
    for pattern, types in kinds.items():
        of = sum(map(len, types.values()))
        for qtype, same in types.items():
            layers = sorted(int(found[1]) for t in same if (found := _LAYER.match(t.spec.name)))
            size = sum(t.nbytes for t in same)
            rows.append(TypeRow(pattern, qtype, layer_ranges(layers), len(same), of, size))
    whole = {p: sum(row.nbytes for row in rows if row.pattern == p) for p in kinds}
    return tuple(sorted(rows, key=lambda row: (-whole[row.pattern], row.pattern, -row.nbytes, row.type)))


def type_table(rows: Iterable[TypeRow]) -> str:
    """The rows as text; long lists of layers are cut."""
    lines = [(row.pattern, row.type, row.count, f"{row.nbytes:,}", _shown(row)) for row in rows]
    return table(("tensor", "type", ">count", ">bytes", "layers"), lines)


def _shown(row: TypeRow) -> str:
    if not row.layers or row.count == row.of:
        return "all" if row.layers else ""
    if len(row.layers) <= _LONGEST_RANGES:
        return row.layers
    return row.layers[:_LONGEST_RANGES].rpartition(",")[0] + f" ... {row.layers.rpartition(',')[2]}"
