"""Types chosen tensor by tensor under a byte budget, from errors measured on a sample of the checkpoint's weights.

A tensor's error under a type is the squared error of its sample relative to the sample's own squares, weighted by the
importance of the columns where an imatrix is given, times the weights of the tensor: what the whole tensor would lose
if its sample stands for it. The sample is the same rows every time, so the choice is too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from convert.domain import TensorSpec
from convert.plan import Checkpoint, Choices, make_plan, recipe_tensors
from convert.reading import read_rows
from convert.transforms import TRANSFORMS, expert_rows
from quant import ggml
from quant.budget import Candidate, choose_types
from quant.encode import encode, to_float
from quant.errors import UsageError
from quant.imatrix import Imatrix
from quant.recipe_floors import FLOORS, below
from quant.recipe_rules import quantizable
from quant.tensors import F32Array, Rows
from quant.types import QuantType, block_size, nbytes, row_bytes

# MXFP4 itself is exact at 4.25 bits, so that nothing above it is worth its bytes for packed weights.
_PACKED_TYPES = (QuantType.Q2_K, QuantType.Q3_K, QuantType.MXFP4)
_PLAIN_TYPES = (QuantType.Q2_K, QuantType.Q3_K, QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)
_SAMPLED_PLACES = 8
_SAMPLED_WEIGHTS = 1 << 14
_SLACK = 1 << 16
"""Bytes of headers and padding that a cut into other files may add."""

Encoder = Literal["ggml", "native"]


def within_target(checkpoint: Checkpoint, choices: Choices, imatrix: Imatrix | None) -> Choices:
    """``choices`` with a table of types in place of a target size; unchanged when there is none.

    Raises:
        UsageError: the smallest types do not fit the target.
        ValueFault: a sampled weight that no output may contain.
    """
    if choices.target_size is None:
        return choices
    candidates = list(_candidates(checkpoint, choices, imatrix))
    smallest: dict[str, Candidate] = {}
    for candidate in candidates:
        known = smallest.setdefault(candidate.tensor_name, candidate)
        if candidate.nbytes < known.nbytes:
            smallest[candidate.tensor_name] = candidate
    table = {name: candidate.qtype for name, candidate in smallest.items()}
    needed = make_plan(checkpoint, replace(choices, table=table), imatrix).nbytes + _SLACK
    if needed > choices.target_size:
        raise UsageError(
            f"--target-size {choices.target_size:,} is too small: the smallest types take {needed:,} bytes",
            "raise the target size",
        )
    # Headers, padding and the tensors that are F32 in every file take the same whatever is chosen.
    fixed = needed - sum(candidate.nbytes for candidate in smallest.values())
    return replace(choices, table=choose_types(candidates, choices.target_size - fixed))


def _candidates(checkpoint: Checkpoint, choices: Choices, imatrix: Imatrix | None) -> Iterator[Candidate]:
    encoder: Encoder = "native" if choices.encoder == "native" else "ggml"
    for spec, tensor in zip(checkpoint.specs, recipe_tensors(checkpoint.specs), strict=True):
        if not quantizable(tensor):
            continue
        types = _types(spec)
        sample = None if len(types) == 1 else list(_sample(checkpoint, spec, imatrix))
        for qtype in types:
            error = 0.0 if sample is None else _relative_error(sample, qtype, encoder) * int(np.prod(spec.shape))
            yield Candidate(spec.name, qtype, nbytes(qtype, spec.shape), error)


def _types(spec: TensorSpec) -> tuple[QuantType, ...]:
    """Types that the tensor's floor and rows allow; those of the checkpoint where none is."""
    wanted = _PACKED_TYPES if spec.source_type == "MXFP4" else _PLAIN_TYPES
    floor = FLOORS.get(spec.cls)
    if floor is QuantType.F32:
        return (QuantType.F32,)
    fitting = tuple(q for q in wanted if not below(q, floor) and spec.shape[-1] % block_size(q) == 0)
    return fitting or (QuantType.BF16,)


def _sample(
    checkpoint: Checkpoint, spec: TensorSpec, imatrix: Imatrix | None
) -> Iterator[tuple[Rows, F32Array | None]]:
    """Rows from places spread evenly over the tensor, over the experts of a stack, with the importance of each."""
    quantum = TRANSFORMS[spec.transform].quantum(spec)
    per_matrix = expert_rows(spec)
    rows = per_matrix * (spec.experts or 1)
    places = min(_SAMPLED_PLACES, rows // quantum)
    count = max(_SAMPLED_WEIGHTS // (spec.shape[-1] * quantum), 1) * quantum
    for place in range(places):
        begin = rows * place // places // quantum * quantum
        # A sample stays inside its expert.
        end = min(begin + count, (begin // per_matrix + 1) * per_matrix)
        weights = None
        if imatrix is not None:
            matrix = begin // spec.shape[-2] if len(spec.shape) == 3 else 0
            weights = imatrix.importance_of(spec.name, spec.shape, matrix)
        yield read_rows(checkpoint.source, spec, begin, end), weights


def _relative_error(sample: list[tuple[Rows, F32Array | None]], qtype: QuantType, encoder: Encoder) -> float:
    lost = held = 0.0
    for rows, weights in sample:
        values = to_float(rows)
        columns = values.shape[1]
        data = encode(rows, qtype, encoder=encoder, importance=weights).reshape(-1, row_bytes(qtype, columns))
        share = np.ones(columns) if weights is None else weights.astype(np.float64)
        lost += float((np.square(values - ggml.decode(data, qtype, columns), dtype=np.float64) * share).sum())
        held += float((np.square(values, dtype=np.float64) * share).sum())
    return lost / held if held else 0.0
