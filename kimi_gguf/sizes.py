"""Bytes and bits per weight of a model, by tensor type; the same report for a plan and for a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quant.types import QuantType


@dataclass(frozen=True, slots=True)
class SizedTensor:
    """A tensor as sizes are counted: type, weights, bytes, and whether it is a stack of routed experts."""

    qtype: QuantType
    weights: int
    nbytes: int
    is_expert: bool


@dataclass(frozen=True, slots=True)
class TypeRow:
    """All tensors of one type."""

    type: str
    tensors: int
    weights: int
    nbytes: int

    @property
    def bits(self) -> float:
        return bits_per_weight(self.nbytes, self.weights)


@dataclass(frozen=True, slots=True)
class SizeReport:
    """Sizes of tensor data; ``rows`` from the largest type to the smallest."""

    rows: tuple[TypeRow, ...]
    experts: TypeRow
    total: TypeRow

    def to_dict(self) -> dict[str, Any]:
        return {
            "tensors": self.total.tensors,
            "weights": self.total.weights,
            "tensor_bytes": self.total.nbytes,
            "bits_per_weight": round(self.total.bits, 4),
            "expert_bits_per_weight": round(self.experts.bits, 4) if self.experts.weights else None,
            "types": [
                {"type": r.type, "tensors": r.tensors, "weights": r.weights, "bytes": r.nbytes} for r in self.rows
            ],
        }


def bits_per_weight(nbytes: int, weights: int) -> float:
    return 8 * nbytes / weights if weights else 0.0


def size_report(tensors: Iterable[SizedTensor]) -> SizeReport:
    """Count ``tensors`` by type, for the routed experts, and in all."""
    counts: dict[str, list[int]] = {}
    experts, total = [0, 0, 0], [0, 0, 0]
    for tensor in tensors:
        for count in (counts.setdefault(tensor.qtype.name, [0, 0, 0]), total, *([experts] if tensor.is_expert else [])):
            count[0] += 1
            count[1] += tensor.weights
            count[2] += tensor.nbytes
    rows = sorted((TypeRow(name, *count) for name, count in counts.items()), key=lambda row: -row.nbytes)
    return SizeReport(tuple(rows), TypeRow("experts", *experts), TypeRow("total", *total))


def human_bytes(nbytes: int) -> str:
    """Bytes in powers of 1000: ``1,561.52 GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes} B"
