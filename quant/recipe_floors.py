"""Floors below which no recipe goes, and the types that a user states against a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from quant.errors import UsageError
from quant.ggml import ENCODABLE
from quant.recipe_rules import quantizable
from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType, block_bytes, block_size

FLOORS: Final[dict[TensorClass, QuantType]] = {
    TensorClass.ROUTER: QuantType.F32,
    TensorClass.ROUTER_BIAS: QuantType.F32,
    TensorClass.NORM: QuantType.F32,
    TensorClass.RESIDUAL_SCORE: QuantType.F32,
    TensorClass.KDA_CONV: QuantType.F32,
    TensorClass.KDA_STATE: QuantType.F32,
    TensorClass.INDEXER_WEIGHTS: QuantType.F32,
    TensorClass.INDEXER: QuantType.Q8_0,
    TensorClass.KDA_LOW_RANK: QuantType.Q8_0,
    TensorClass.MLA_ABSORBED: QuantType.Q8_0,
}
"""The least precise type that any recipe gives a class; F32 means that alone."""


def below(qtype: QuantType, floor: QuantType | None) -> bool:
    """Whether ``qtype`` is less precise than a floor allows; an F32 floor allows F32 alone, None everything."""
    if floor is None or floor is QuantType.F32:
        return floor is not None and qtype is not QuantType.F32
    return block_bytes(qtype) * block_size(floor) < block_bytes(floor) * block_size(qtype)


def stated_types(
    tensors: Sequence[RecipeTensor],
    overrides: Sequence[tuple[str, QuantType]],
    output_type: QuantType | None,
    embedding_type: QuantType | None,
) -> dict[int, QuantType]:
    """Types that the user states, by tensor index.

    Args:
        tensors: the whole model.
        overrides: (regular expression, type); the first that is found in a name wins, case is ignored.
        output_type, embedding_type: types of output.weight and token_embd.weight; they win over expressions.

    Raises:
        UsageError: a bad expression, one that fits no tensor whose type can be chosen, or a type without encoder.
    """
    patterns = [(_compile(pattern), qtype) for pattern, qtype in overrides]
    fixed = {"output.weight": output_type, "token_embd.weight": embedding_type}
    for qtype in (*(t for _, t in patterns), *(t for t in fixed.values() if t is not None)):
        check_encodable(qtype, "override")
    stated: dict[int, QuantType] = {}
    used: set[int] = set()
    for index, tensor in enumerate(tensors):
        # A router can be forced to another type; what else the quantizer passes over must stay F32 to be loaded.
        if not quantizable(tensor) and tensor.cls is not TensorClass.ROUTER:
            continue
        hits = [number for number, (pattern, _) in enumerate(patterns) if pattern.search(tensor.name)]
        used.update(hits)
        given = fixed.get(tensor.name)
        if given is not None:
            stated[index] = given
        elif hits:
            stated[index] = patterns[hits[0]][1]
    for number, (pattern, qtype) in enumerate(patterns):
        if number not in used:
            raise UsageError(
                f"--tensor-type {pattern.pattern}={qtype.name} fits no tensor whose type can be chosen",
                "expressions are searched for in names like blk.3.ffn_down_exps.weight;"
                " vectors, norms and convolutions are F32 in every file",
            )
    return stated


def check_encodable(qtype: QuantType, what: str) -> None:
    """Refuse types that no encoder writes.

    Raises:
        UsageError: names ``what`` asked for the type, and the types there are.
    """
    if qtype not in ENCODABLE:
        names = ", ".join(sorted(t.name for t in ENCODABLE))
        raise UsageError(f"{what}: {qtype.name} cannot be written", f"types: {names}")


def refuse_below_floor(tensors: Sequence[RecipeTensor], stated: Mapping[int, QuantType]) -> None:
    """Refuse stated types below a floor.

    Raises:
        UsageError: names the first such tensor, its floor, and how many there are.
    """
    low = [i for i, qtype in stated.items() if below(qtype, FLOORS.get(tensors[i].cls))]
    if low:
        first = tensors[low[0]]
        raise UsageError(
            f"{stated[low[0]].name} for {first.name} ({first.cls}) is below its floor {FLOORS[first.cls].name}"
            + (f", and so for {len(low) - 1} more tensors" if len(low) > 1 else ""),
            "narrow the --tensor-type expression, or add --force to accept the loss",
        )


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(
            f"--tensor-type {pattern!r} is not a regular expression: {error}", "write \\. for a dot, \\( for a bracket"
        ) from None
