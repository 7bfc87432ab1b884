"""``--target-size``: the types with the least measured error that keep all files within a number of bytes.

What is fixed first: types that the user states, floors, and what a row of weights can be stored as. The smallest and
the exact types are planned without a look at the weights, so a target below the one is refused, and one above the
other is met, at once. In between, every tensor's candidates are measured (``convert.sampled_error``) and the best
combination is sought (``quant.budget``). Headers and cuts into files depend a little on the choice: when the plan of
a choice is over the target, it is made again with that much less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from convert.domain import TensorSpec
from convert.gguf_file import padded
from convert.plan import Checkpoint, Choices, make_plan, recipe_tensors
from convert.sampled_error import measure, weight_in_sum
from quant.budget import Candidate, choose_types
from quant.encode import Encoder
from quant.errors import UsageError
from quant.imatrix import Imatrix
from quant.recipe_floors import FLOORS, below, refuse_below_floor, stated_types
from quant.recipe_rules import fit_rows, quantizable
from quant.types import QuantType, nbytes, parse_type

# MXFP4 itself is exact at 4.25 bits, so nothing above it is worth its bytes for packed weights.
_PACKED_TYPES = (QuantType.Q2_K, QuantType.Q3_K, QuantType.MXFP4)
_PLAIN_TYPES = (
    *(QuantType.Q2_K, QuantType.Q3_K, QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0),
    QuantType.BF16,
)


def within_target(
    checkpoint: Checkpoint,
    choices: Choices,
    imatrix: Imatrix | None,
    *,
    threads: int = 1,
    measured: Callable[[int, int], None] = lambda done, total: None,
) -> Choices:
    """``choices`` with a table of types in place of a target size; unchanged when there is none.

    Args:
        threads: processors to measure with; the result does not depend on it.
        measured: told how many of how many tensors have been measured.

    Raises:
        UsageError: the smallest types do not fit the target, or a stated type is below its floor or has no encoder.
        ValueFault: a sampled weight that no output may contain.
        InputError: a shard or the imatrix cannot be read.
    """
    target = choices.target_size
    if target is None:
        return choices
    wanted = candidate_types(checkpoint, choices)

    def planned(table: Mapping[str, QuantType]) -> int:
        return make_plan(checkpoint, replace(choices, table=table), imatrix).nbytes

    smallest = {spec.name: min(types, key=lambda q: (nbytes(q, spec.shape), q)) for spec, types in wanted.items()}
    least = planned(smallest)
    if least > target:
        raise UsageError(
            f"--target-size {target:,} is too small: the smallest types take {least:,} bytes",
            f"give at least --target-size {least}",
        )
    exact = {spec.name: _exact(spec, types) for spec, types in wanted.items()}
    if planned(exact) <= target:
        return replace(choices, table=exact)
    encoder: Encoder = "native" if choices.encoder == "native" else "ggml"
    free = {spec: types for spec, types in wanted.items() if len(types) > 1}
    errors = measure(checkpoint.source, free, encoder=encoder, imatrix=imatrix, threads=threads, measured=measured)
    candidates = [
        Candidate(spec.name, qtype, padded(nbytes(qtype, spec.shape)), error * weight_in_sum(spec, checkpoint.config))
        for spec, found in zip(free, errors, strict=True)
        for qtype, error in found.items()
    ]
    # Headers, padding and all tensors with one type only take the same whatever is chosen, but for more or fewer files.
    smallest_free = sum(padded(nbytes(smallest[spec.name], spec.shape)) for spec in free)
    budget = target - least + smallest_free
    while True:
        table = smallest | choose_types(candidates, budget)
        excess = planned(table) - target
        if excess <= 0:
            return replace(choices, table=table)
        budget = max(budget - excess, smallest_free)


def candidate_types(checkpoint: Checkpoint, choices: Choices) -> dict[TensorSpec, tuple[QuantType, ...]]:
    """The types that each tensor whose type can be chosen may have; one type where the user states it.

    Raises:
        UsageError: a stated type is below its floor or cannot be written, or an expression fits no tensor.
    """
    tensors = recipe_tensors(checkpoint.specs)
    stated = stated_types(tensors, choices.tensor_types, choices.output_type, choices.embedding_type)
    if not choices.force:
        refuse_below_floor(tensors, stated)
    return {
        spec: (fit_rows(stated[index], spec.shape[-1]),) if index in stated else _types(spec)
        for index, (spec, tensor) in enumerate(zip(checkpoint.specs, tensors, strict=True))
        if quantizable(tensor)
    }


def _types(spec: TensorSpec) -> tuple[QuantType, ...]:
    """Types that the tensor's floor and rows allow, none of them larger than what the checkpoint holds."""
    floor = FLOORS.get(spec.cls)
    if floor is QuantType.F32:
        return (QuantType.F32,)
    source = parse_type(spec.source_type)
    wanted = _PACKED_TYPES if source is QuantType.MXFP4 else (*_PLAIN_TYPES, source)
    fitting = dict.fromkeys(fit_rows(qtype, spec.shape[-1]) for qtype in wanted)
    types = tuple(
        qtype
        for qtype in fitting
        if qtype is not QuantType.F16
        and not below(qtype, floor)
        and nbytes(qtype, spec.shape) <= nbytes(source, spec.shape)
    )
    return types or (floor or QuantType.BF16,)


def _exact(spec: TensorSpec, types: tuple[QuantType, ...]) -> QuantType:
    """The type of the checkpoint where it may be taken, else the largest."""
    source = parse_type(spec.source_type)
    return source if source in types else max(types, key=lambda qtype: (nbytes(qtype, spec.shape), qtype))
