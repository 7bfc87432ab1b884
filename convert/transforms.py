"""How checkpoint bytes become rows of GGUF values: pure functions that can work on any range of rows.

A transform says which byte ranges a range of output rows needs (``reads``) and turns those bytes into rows
(``apply``). Rows are those of the GGUF tensor flattened to two axes. Every input byte belongs to the rows of exactly
one output, so that walking all rows of all tensors reads each byte once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convert.domain import SourceTensor, TensorSpec
from quant.errors import ValueFault
from quant.tensors import Bf16Rows, F32Array, F32Rows, Mxfp4Rows, Rows

Array = npt.NDArray[Any]
Tensors = Mapping[str, SourceTensor]

_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One array that a transform needs, gathered from ranges of one shard.

    Attributes:
        shard: index of the shard.
        dtype, shape: of the array; BF16 arrives as U16 bits.
        ranges: (offset in the file, bytes) in the order in which they fill the array.
    """

    shard: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.ranges)


Reads = Callable[[TensorSpec, Tensors, int, int], tuple[Operand, ...]]
Apply = Callable[[TensorSpec, Sequence[Array]], Rows]


@dataclass(frozen=True, slots=True)
class Transform:
    """One way from checkpoint to GGUF.

    Attributes:
        reads: (spec, tensors, row_begin, row_end) -> operands.
        apply: (spec, arrays of the operands) -> rows; may return views of the arrays.
        quantum: (spec) -> ranges of rows begin and end at multiples of this.
    """

    reads: Reads
    apply: Apply
    quantum: Callable[[TensorSpec], int]


def row_count(spec: TensorSpec) -> int:
    """Rows of the tensor, flattened to two axes."""
    return math.prod(spec.shape[:-1])


def expert_rows(spec: TensorSpec) -> int:
    """Rows of one expert of a stack, or of the whole tensor when it is none."""
    return row_count(spec) // (spec.experts or 1)


def source_names(spec: TensorSpec, row_begin: int, row_end: int) -> Iterator[str]:
    """Checkpoint names that rows [row_begin, row_end) of ``spec`` read from."""
    if not spec.experts:
        yield from spec.sources
        return
    rows = expert_rows(spec)
    for expert in range(row_begin // rows, -(-row_end // rows)):
        for source in spec.sources:
            yield source.format(e=expert)


def chunks(spec: TensorSpec, row_begin: int, row_end: int, weights: int, parts: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of at most about ``weights`` weights that cover [row_begin, row_end).

    None crosses from one expert into the next, nor from one of the ``parts`` equal parts of the tensor.
    """
    quantum = TRANSFORMS[spec.transform].quantum(spec)
    step = max(weights // (spec.shape[-1] * quantum), 1) * quantum
    bound = row_count(spec) // max(parts, spec.experts, 1)
    while row_begin < row_end:
        end = min(row_begin + step, (row_begin // bound + 1) * bound, row_end)
        yield row_begin, end
        row_begin = end


def _slice(tensor: SourceTensor, row_begin: int, row_end: int) -> Operand:
    """Rows of a source whose rows are those of the output."""
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = math.prod(tensor.shape[:-1])
    width = tensor.nbytes // rows
    begin = tensor.begin + row_begin * width
    return Operand(
        tensor.shard,
        _DTYPES[tensor.dtype],
        (row_end - row_begin, columns),
        ((begin, (row_end - row_begin) * width),),
    )


def _read_rows(spec: TensorSpec, tensors: Tensors, row_begin: int, row_end: int) -> tuple[Operand, ...]:
    return tuple(_slice(tensors[name], row_begin, row_end) for name in spec.sources)


def _read_expert(spec: TensorSpec, tensors: Tensors, row_begin: int, row_end: int) -> tuple[Operand, ...]:
    rows = expert_rows(spec)
    expert = row_begin // rows
    first = row_begin - expert * rows
    return tuple(_slice(tensors[name.format(e=expert)], first, first + row_end - row_begin) for name in spec.sources)


def _read_whole(spec: TensorSpec, tensors: Tensors, row_begin: int, row_end: int) -> tuple[Operand, ...]:
    return tuple(_slice(tensors[name], 0, math.prod(tensors[name].shape[:-1])) for name in spec.sources)


def _read_heads(spec: TensorSpec, tensors: Tensors, first: int, count: int, rows: int, skip: int) -> Operand:
    """``rows`` rows of each of ``count`` heads of kv_b, after ``skip`` rows of the head."""
    tensor = tensors[spec.sources[0]]
    per_head = tensor.shape[0] // spec.shape[0]
    width = tensor.nbytes // tensor.shape[0]
    ranges = tuple(
        (tensor.begin + (head * per_head + skip) * width, rows * width) for head in range(first, first + count)
    )
    return Operand(tensor.shard, _DTYPES[tensor.dtype], (count, rows, tensor.shape[1]), ranges)


def _read_head_keys(spec: TensorSpec, tensors: Tensors, row_begin: int, row_end: int) -> tuple[Operand, ...]:
    _, latent, keys = spec.shape
    return (_read_heads(spec, tensors, row_begin // latent, (row_end - row_begin) // latent, keys, 0),)


def _read_head_values(spec: TensorSpec, tensors: Tensors, row_begin: int, row_end: int) -> tuple[Operand, ...]:
    heads, values, _ = spec.shape
    keys = tensors[spec.sources[0]].shape[0] // heads - values
    return (_read_heads(spec, tensors, row_begin // values, (row_end - row_begin) // values, values, keys),)


def _no_reads(spec: TensorSpec, tensors: Tensors, row_begin: int, row_end: int) -> tuple[Operand, ...]:
    return ()


def _plain(array: Array) -> Rows:
    """Rows of a BF16 (as U16) or F32 array, flattened to two axes."""
    rows = array.reshape(-1, array.shape[-1])
    return Bf16Rows(rows) if rows.dtype == np.uint16 else F32Rows(rows)


def _floats(array: Array) -> F32Array:
    """The values of a BF16 (as U16) or F32 array, exactly."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _copy(spec: TensorSpec, arrays: Sequence[Array]) -> Rows:
    return _plain(arrays[0])


def _product(spec: TensorSpec, arrays: Sequence[Array]) -> Rows:
    """Norm weight times projection, in float32: a score depends on nothing but the product."""
    with np.errstate(over="ignore", invalid="ignore"):
        return F32Rows(_floats(arrays[0]).reshape(1, -1) * _floats(arrays[1]).reshape(1, -1))


def _decay(spec: TensorSpec, arrays: Sequence[Array]) -> Rows:
    """-exp(A_log) of the first entries, one per head; what follows is padding.

    The exponential is taken in double precision and rounded once, so that it is the same on every processor.
    """
    logs = _floats(arrays[0]).reshape(-1)[: spec.shape[0]]
    if not np.isfinite(logs).all() or logs.max() > 88:
        worst = logs[int(np.argmax(~np.isfinite(logs) | (logs > 88)))]
        raise ValueFault(f"A_log holds {worst}, of which -exp is not a float32", "the checkpoint is damaged")
    return F32Rows(np.array([[-math.exp(value) for value in logs]], dtype=np.float32))


def _packed(spec: TensorSpec, arrays: Sequence[Array]) -> Rows:
    return Mxfp4Rows(arrays[0], arrays[1])


def _head_keys(spec: TensorSpec, arrays: Sequence[Array]) -> Rows:
    """Per head [keys, latent] -> [latent, keys]: the key half of kv_b is applied to the query (absorbed MLA)."""
    return _plain(np.ascontiguousarray(arrays[0].transpose(0, 2, 1)))


def _zeros(spec: TensorSpec, arrays: Sequence[Array]) -> Rows:
    return F32Rows(np.zeros((1, spec.shape[-1]), dtype=np.float32))


def _one(spec: TensorSpec) -> int:
    return 1


def _head(spec: TensorSpec) -> int:
    return spec.shape[1]


TRANSFORMS: dict[str, Transform] = {
    "copy": Transform(_read_rows, _copy, _one),
    "packed": Transform(_read_rows, _packed, _one),
    "product": Transform(_read_whole, _product, _one),
    "decay": Transform(_read_whole, _decay, _one),
    "head_keys": Transform(_read_head_keys, _head_keys, _head),
    "head_values": Transform(_read_head_values, _copy, _head),
    "experts": Transform(_read_expert, _copy, _one),
    "packed_experts": Transform(_read_expert, _packed, _one),
    "zeros": Transform(_no_reads, _zeros, _one),
}
"""Every transform by the name that a ``TensorSpec`` carries."""
