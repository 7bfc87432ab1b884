"""What a plan tells about a recipe's outcome: substitutions with their bytes, growth, missing importance."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from quant.recipe_floors import FLOORS
from quant.recipe_rules import fit_rows, needs_importance
from quant.recipes import Assignment
from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType, block_bytes, block_size, nbytes, parse_type


@dataclass(frozen=True, slots=True)
class Substitution:
    """Tensors of one class whose type is not the recipe's, for one reason.

    Attributes:
        cls: tensor class.
        recipe_type, qtype: what the recipe names, and what is written.
        reason: why.
        names: the tensors.
        extra_bytes: bytes more (or, below zero, fewer) than with the recipe's type, after its own fallback for rows
            that are not whole blocks.
    """

    cls: TensorClass
    recipe_type: QuantType
    qtype: QuantType
    reason: str
    names: tuple[str, ...]
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Tensors of one class whose type takes more bytes than the checkpoint's."""

    cls: TensorClass
    source_type: QuantType
    qtype: QuantType
    count: int
    source_bytes: int
    nbytes: int


def substitutions(tensors: Sequence[RecipeTensor], assignments: Sequence[Assignment]) -> list[Substitution]:
    """Every assignment that carries a reason, grouped; in the order of first appearance."""
    groups: dict[tuple[TensorClass, QuantType, QuantType, str], tuple[list[str], int]] = {}
    for tensor, assignment in zip(tensors, assignments, strict=True):
        if assignment.reason is None:
            continue
        key = (tensor.cls, assignment.recipe_type, assignment.qtype, assignment.reason)
        names, extra = groups.setdefault(key, ([], 0))
        recipe_bytes = nbytes(fit_rows(assignment.recipe_type, tensor.shape[-1]), tensor.shape)
        names.append(tensor.name)
        groups[key] = (names, extra + nbytes(assignment.qtype, tensor.shape) - recipe_bytes)
    return [Substitution(*key, tuple(names), extra) for key, (names, extra) in groups.items()]


def costs_more(source_type: str, qtype: QuantType) -> bool:
    """Whether ``qtype`` takes more bits per weight than the checkpoint's ``MXFP4``, ``BF16`` or ``F32``."""
    source = parse_type(source_type)
    return block_bytes(qtype) * block_size(source) > block_bytes(source) * block_size(qtype)


def growths(tensors: Sequence[RecipeTensor], assignments: Sequence[Assignment]) -> list[Growth]:
    """Classes that grow against the checkpoint, largest growth first; those that are F32 by a floor are left out."""
    totals: dict[tuple[TensorClass, QuantType, QuantType], tuple[int, int, int]] = {}
    for tensor, assignment in zip(tensors, assignments, strict=True):
        fixed = FLOORS.get(tensor.cls) is QuantType.F32
        if fixed or not costs_more(tensor.source_type, assignment.qtype):
            continue
        key = (tensor.cls, parse_type(tensor.source_type), assignment.qtype)
        count, before, after = totals.get(key, (0, 0, 0))
        before += nbytes(key[1], tensor.shape)
        totals[key] = (count + 1, before, after + nbytes(assignment.qtype, tensor.shape))
    found = [Growth(*key, *total) for key, total in totals.items()]
    return sorted(found, key=lambda g: g.source_bytes - g.nbytes)


def missing_importance(
    recipe: str, tensors: Sequence[RecipeTensor], assignments: Sequence[Assignment], available: Container[str]
) -> list[str]:
    """Tensors that llama.cpp refuses to write without importance and that ``available`` does not hold.

    Args:
        recipe: canonical name.
        tensors, assignments: as given to and by ``assign``.
        available: names that have an entry in the importance matrix; empty when there is none.
    """
    return [
        tensor.name
        for tensor, assignment in zip(tensors, assignments, strict=True)
        if needs_importance(tensor.name, assignment.qtype, recipe) and tensor.name not in available
    ]


def dominant_type(tensors: Sequence[RecipeTensor], assignments: Sequence[Assignment]) -> QuantType:
    """The type that holds most of the weights; names a file whose types come from a table."""
    weights: dict[QuantType, int] = {}
    for tensor, assignment in zip(tensors, assignments, strict=True):
        weights[assignment.qtype] = weights.get(assignment.qtype, 0) + math.prod(tensor.shape)
    return max(weights, key=lambda qtype: (weights[qtype], -int(qtype)))
