"""Rows of an output tensor read from a checkpoint, not yet encoded."""

from __future__ import annotations

import numpy as np

from convert.domain import Source, TensorSpec
from convert.transforms import TRANSFORMS, Array, Operand, expert_rows, source_names
from quant.errors import ValueFault
from quant.tensors import Rows, U8Array


def fill(source: Source, operand: Operand, data: U8Array) -> Array:
    """The array of an operand, read into ``data``: U8 [operand.nbytes], which the array shares."""
    view = data.data
    for offset, size in operand.ranges:
        source.read_into(operand.shard, offset, view[:size])
        view = view[size:]
    array: Array = data.view(operand.dtype)
    return array.reshape(operand.shape)


def read_rows(source: Source, spec: TensorSpec, begin: int, end: int) -> Rows:
    """Rows [begin, end) of a tensor; begin and end are multiples of its transform's quantum.

    Raises:
        InputError: a shard cannot be read.
        ValueFault: a value that the transform refuses.
    """
    transform = TRANSFORMS[spec.transform]
    operands = transform.reads(spec, source.tensors, begin, end)
    return transform.apply(spec, [fill(source, o, np.empty(o.nbytes, dtype=np.uint8)) for o in operands])


def located(fault: ValueFault, source: Source, spec: TensorSpec, begin: int) -> ValueFault:
    """``fault``, met in rows of ``spec`` from ``begin`` on, with the names of tensor, expert, row and sources."""
    row = begin + (fault.row or 0)
    rows = expert_rows(spec)
    where = [spec.name]
    if spec.experts:
        where.append(f"expert {row // rows}")
    if fault.row is not None:
        where.append(f"row {row % rows}")
    names = list(source_names(spec, row, row + 1))
    shards = {source.shards[source.tensors[name].shard].name for name in names}
    origin = f" (from {' and '.join(names)} in {' and '.join(sorted(shards))})" if names else ""
    return ValueFault(f"{', '.join(where)}: {fault.message}{origin}", fault.hint, fault.row)
