"""Rows of an output tensor read from a checkpoint, not yet encoded."""

from __future__ import annotations

import numpy as np

from convert.domain import Source, TensorSpec
from convert.transforms import TRANSFORMS, Array, Operand
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
