"""What probably happened to rows that are not what the checkpoint makes of them; each known fault has its test here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from convert.domain import TensorSpec
from convert.transforms import TRANSFORMS, expert_rows
from kimi_gguf.verify.payload_rows import Pair, is_float
from quant import ggml
from quant.encode import to_float
from quant.errors import KimiGgufError
from quant.tensors import F32Array, TensorClass
from quant.types import QuantType

_ROWS = 4
_GROUP = 32
# Two unrelated matrices of one scale are 1.4 apart; the worst type is within 0.7 of its source.
_SAME = 0.75
_LEAST_SHIFT = 0.02
_USUAL = 1.2


def diagnose(pair: Pair, spec: TensorSpec, qtype: QuantType, row: int) -> str:
    """A clause about the rows from ``row`` on, for example ``expert 3 holds the values of expert 7``."""
    rows = expert_rows(spec)
    where = f"expert {row // rows}, row {row % rows}" if spec.experts else f"row {row}"
    quantum = TRANSFORMS[spec.transform].quantum(spec)
    begin = row // quantum * quantum
    end = min(begin + max(quantum, _ROWS), (row // rows + 1) * rows)
    try:
        values = to_float(pair.expected(spec, begin, end))
        found = ggml.decode(pair.found(spec.name, begin, end), qtype, spec.shape[-1])
    except KimiGgufError as fault:
        return f"{where}: {fault.message}"
    if not np.isfinite(found).all():
        return f"{where}: holds values that are not finite"
    cause = next((text for text, likely in _suspects(pair, spec, qtype, begin, found, values) if likely()), None)
    if cause is not None:
        return f"{where}: {cause}"
    error = _distance(found, values)
    if not error:
        return f"{where}: only the encoding differs"
    if not is_float(qtype) and qtype not in ggml.NEEDS_IMPORTANCE:
        usual = _distance(ggml.decode(ggml.encode(values, qtype), qtype, spec.shape[-1]), values)
        if error <= _USUAL * usual:
            return f"{where}: encoded otherwise, with an error usual for {qtype.name}: another version of the encoder?"
    return f"{where}: the values are off by {error:.3g} of their size"


Suspect = tuple[str, Callable[[], bool]]


def _suspects(
    pair: Pair, spec: TensorSpec, qtype: QuantType, begin: int, found: F32Array, values: F32Array
) -> Iterator[Suspect]:
    """Faults that could be, likeliest first; a fault is asked about only when those before it are excluded."""
    if not found.any() and values.any():
        yield "all zero", lambda: True
        return
    close = _distance(found, values)

    def fits(other: F32Array) -> bool:
        error = _distance(found, other)
        return error < _SAME and error < close / 2

    if spec.transform == "decay":
        yield "the sign is wrong: it holds exp(A_log), not -exp(A_log)", lambda: fits(-values)
        yield "it holds A_log itself, not -exp(A_log)", lambda: fits(np.log(np.maximum(-values, 1e-30)))
    if spec.transform == "head_keys":
        _, latent, keys = spec.shape
        yield (
            "the matrices of the heads are not transposed",
            lambda: fits(values.reshape(-1, latent, keys).transpose(0, 2, 1).reshape(values.shape)),
        )
    yield "the sign is wrong", lambda: fits(-values)
    if spec.source_type == "MXFP4":
        for text, order in _nibble_orders():
            yield text, lambda order=order: fits(_permuted(values, order))  # type: ignore[misc]
    shift = float((found * values).sum() / max(float((values * values).sum()), 1e-30))
    yield (
        f"the scale is wrong: values are {shift:.4g} times the checkpoint's",
        lambda: abs(shift - 1) > _LEAST_SHIFT and fits(np.float32(shift) * values),
    )
    if spec.experts:
        yield from _other_experts(pair, spec, begin, found, fits)
    if spec.cls is TensorClass.ROUTER:
        yield f"the router was quantized (off by {close:.2g}): stored as {qtype.name}", lambda: 0 < close < _SAME


def _other_experts(
    pair: Pair, spec: TensorSpec, begin: int, found: F32Array, fits: Callable[[F32Array], bool]
) -> Iterator[Suspect]:
    rows = expert_rows(spec)
    mine, first = divmod(begin, rows)
    for expert in range(spec.experts):
        if expert == mine:
            continue

        def likely(expert: int = expert) -> bool:
            at = expert * rows + first
            return fits(to_float(pair.expected(spec, at, at + len(found))))

        yield f"it holds the values of expert {expert}", likely


def _nibble_orders() -> Iterator[tuple[str, list[int]]]:
    half = _GROUP // 2
    yield "the nibbles of each byte are swapped", [i ^ 1 for i in range(_GROUP)]
    yield "the nibbles of each byte are swapped", [(i + half) % _GROUP for i in range(_GROUP)]
    # Packed bytes kept as they are: byte j has elements 2j and 2j + 1, a GGUF block reads them as j and j + 16.
    yield "codes were not rearranged for GGUF", [2 * (i % half) + i // half for i in range(_GROUP)]


def _permuted(values: F32Array, order: list[int]) -> F32Array:
    """Each group of 32 columns in another order."""
    groups: F32Array = values.reshape(len(values), -1, _GROUP)[:, :, order].reshape(values.shape)
    return groups


def _distance(found: F32Array, values: F32Array) -> float:
    norm = float(np.linalg.norm(values.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - values)) / max(norm, 1e-30)
