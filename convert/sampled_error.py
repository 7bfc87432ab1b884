"""What each type would cost each tensor, measured on a sample of the checkpoint's weights.

The error of a tensor under a type is its relative squared error, |W - W'|^2 / |W|^2: the noise that the type adds to
the product of W with any activations, relative to the product. With an importance matrix columns count by their
activations. Errors of tensors are added, each times its share in what a token meets (``weight_in_sum``): for small
errors the loss of a model grows with such a sum (Malinovskii et al., "Pushing the limits of large language model
quantization via the linearity theorem", 2024).

The sample is a function of the tensor's shape alone, so the figures are the same in every run and by any number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore

import numpy as np

from convert.config import ModelConfig
from convert.domain import Source, TensorSpec
from convert.reading import located, read_rows
from convert.transforms import TRANSFORMS, row_count
from quant import ggml
from quant.encode import Encoder, encode, to_float
from quant.errors import ValueFault
from quant.imatrix import Imatrix
from quant.tensors import F32Array, Rows, TensorClass
from quant.types import QuantType, row_bytes

SAMPLED_WEIGHTS = 1 << 17
"""Weights of a tensor that are looked at, about."""

_EXPERTS_LOOKED_AT = 16
_PLACES = 8
# Reading waits for a disk or for the Hub, and is worth more threads than there are processors.
_READERS = 8
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some rows of a tensor, and the importance of their columns, F32 [columns], where there is one."""

    begin: int
    rows: Rows
    importance: F32Array | None


def weight_in_sum(spec: TensorSpec, config: ModelConfig) -> float:
    """How much the relative error of a tensor counts in the sum over tensors.

    A matrix of a layer counts 1, since all of what its block adds goes through it. Routed and shared experts are two
    branches whose results are added, so their matrices count a half; in a stack of which k experts work on a token,
    results are averaged, and noise with them, so it counts 1 / 2k. The embedding and the output matrix count as many
    as there are layers: all of a token goes through them, and through a layer only the part that it adds.
    """
    match spec.cls:
        case TensorClass.EMBEDDING | TensorClass.OUTPUT:
            return float(config.n_layers)
        case TensorClass.ROUTED_EXPERT:
            return 1 / (2 * max(config.moe.used, 1))
        case TensorClass.SHARED_EXPERT | TensorClass.LATENT_PROJECTION:
            return 1 / 2
    return 1.0


def places(spec: TensorSpec) -> list[tuple[int, int]]:
    """Ranges of rows that are looked at, each within one matrix: spread over the tensor, in a stack over the experts.

    The tensor is cut into equal strata. In each a range begins at another fraction of it (multiples of the golden
    ratio), so that they do not meet the same row of every head or expert.
    """
    quantum = TRANSFORMS[spec.transform].quantum(spec)
    matrix = _matrix_rows(spec)
    groups = row_count(spec) // quantum
    if row_count(spec) * spec.shape[-1] <= SAMPLED_WEIGHTS:
        return [(begin, begin + matrix) for begin in range(0, row_count(spec), matrix)]
    wanted = _EXPERTS_LOOKED_AT if spec.experts else _PLACES
    weights = quantum * spec.shape[-1]
    count = min(max(SAMPLED_WEIGHTS // (wanted * weights), 1), matrix // quantum)
    number = min(wanted, max(SAMPLED_WEIGHTS // (count * weights), 1), groups // count)
    found = []
    for place in range(number):
        stratum = groups / number
        begin = int(place * stratum + (place + 1) * _GOLDEN_RATIO % 1 * (stratum - count)) * quantum
        begin = min(begin, (begin // matrix + 1) * matrix - count * quantum)
        found.append((begin, begin + count * quantum))
    return found


def measure(
    source: Source,
    wanted: Mapping[TensorSpec, Sequence[QuantType]],
    *,
    encoder: Encoder,
    imatrix: Imatrix | None,
    threads: int,
    measured: Callable[[int, int], None],
) -> list[dict[QuantType, float]]:
    """Relative squared errors of the types wanted for each tensor, in the order of ``wanted``.

    A type that the tensor has in the checkpoint is exact and costs nothing to measure; one that cannot hold the
    sampled values is left out.

    Args:
        threads: how many tensors are encoded at once.
        measured: told, from the calling thread, how many of how many tensors are done.

    Raises:
        ValueFault: a sampled weight that no type can hold; names tensor, expert and row.
        InputError: a shard or the imatrix cannot be read.
    """
    processors = Semaphore(threads)

    def work(item: tuple[TensorSpec, Sequence[QuantType]]) -> dict[QuantType, float]:
        spec, types = item
        if all(qtype.name == spec.source_type for qtype in types):
            return dict.fromkeys(types, 0.0)
        samples = list(_samples(source, spec, imatrix))
        with processors:
            return _errors(source, spec, samples, types, encoder)

    result = []
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="measure")
    try:
        for done, errors in enumerate(pool.map(work, wanted.items()), start=1):
            result.append(errors)
            measured(done, len(wanted))
    finally:
        # A reader may wait for the Hub; whoever gives up closes the source, which ends the wait.
        pool.shutdown(wait=False, cancel_futures=True)
    return result


def relative_error(samples: Sequence[Sampled], qtype: QuantType, encoder: Encoder) -> float:
    """Squared error of the samples as ``qtype``, relative to their own squares; 0 where they are all zero.

    Raises:
        ValueFault: a weight that the type cannot hold; the row is that of the whole tensor.
    """
    lost = held = 0.0
    for sample in samples:
        try:
            values = to_float(sample.rows)
            data = encode(sample.rows, qtype, encoder=encoder, importance=sample.importance)
        except ValueFault as fault:
            raise ValueFault(fault.message, fault.hint, sample.begin + (fault.row or 0)) from None
        columns = values.shape[1]
        back = ggml.decode(data.reshape(-1, row_bytes(qtype, columns)), qtype, columns)
        share = _column_weights(sample.importance, columns)
        lost += float(np.einsum("rc,c->", np.square(values - back, dtype=np.float64), share))
        held += float(np.einsum("rc,c->", np.square(values, dtype=np.float64), share))
    return lost / held if held else 0.0


def _matrix_rows(spec: TensorSpec) -> int:
    """Rows of one of the stacked matrices of a tensor, or of all of it when there is one."""
    return spec.shape[-2] if len(spec.shape) == 3 else row_count(spec)


def _column_weights(importance: F32Array | None, columns: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Importance with a mean of 1, so that experts of busier inputs do not outweigh the others."""
    if importance is None:
        return np.ones(columns)
    weights = importance.astype(np.float64)
    mean = float(weights.mean())
    return weights / mean if mean > 0 else np.ones(columns)


def _errors(
    source: Source, spec: TensorSpec, samples: Sequence[Sampled], types: Sequence[QuantType], encoder: Encoder
) -> dict[QuantType, float]:
    errors: dict[QuantType, float] = {}
    fault: ValueFault | None = None
    for qtype in types:
        try:
            error = relative_error(samples, qtype, encoder)
        except ValueFault as found:
            fault = fault or found
            continue
        errors[qtype] = 0.0 if qtype.name == spec.source_type else error
    if fault is not None and not errors:
        raise located(fault, source, spec, 0)
    return errors


def _samples(source: Source, spec: TensorSpec, imatrix: Imatrix | None) -> Iterator[Sampled]:
    for begin, end in places(spec):
        try:
            rows = read_rows(source, spec, begin, end)
        except ValueFault as fault:
            raise located(fault, source, spec, begin) from fault
        importance = None
        if imatrix is not None:
            importance = imatrix.importance_of(spec.name, spec.shape, begin // _matrix_rows(spec))
        yield Sampled(begin, rows, importance)
