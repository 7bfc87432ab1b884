"""Rows of a GGUF tensor beside the rows that the checkpoint makes of it: read, encode anew, compare, measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convert.domain import Source, TensorSpec
from convert.reading import read_rows
from convert.transforms import row_count
from kimi_gguf.verify.gguf_bytes import GgufBytes
from quant import ggml, native
from quant.encode import Encoder, encode, to_float
from quant.gguf_parser import GgufTensor
from quant.gguf_split import GgufSet
from quant.imatrix import Imatrix
from quant.tensors import F32Array, Rows, U8Array
from quant.types import QuantType, block_size, row_bytes

_FLOATS = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})
_ROUNDING_ULPS = 2
# An encoder that weighs errors gives up some plain error.
_FACTOR, _FACTOR_WEIGHED = 1.5, 2.0
_BLOCK_FACTOR, _BLOCK_WORST = 4.0, 0.95
_SLACK = 1e-4


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to have made the bytes: an encoder, with or without importance."""

    encoder: Encoder
    weighed: bool

    def __str__(self) -> str:
        return f"{self.encoder} with importance" if self.weighed else self.encoder


@dataclass(frozen=True, slots=True)
class Compared:
    """What comparing some rows gave.

    Attributes:
        rows: rows compared; bad: numbers of those that are wrong, in the tensor.
        error2, norm2, reference2: sums of squares of the decoded error, of the checkpoint's values, and of the error
            that ggml's encoder makes; zero where not measured.
    """

    rows: int
    bad: tuple[int, ...]
    error2: float = 0.0
    norm2: float = 0.0
    reference2: float = 0.0


def is_float(qtype: QuantType) -> bool:
    """Whether the type is plain numbers, not blocks."""
    return qtype in _FLOATS


def has_one_encoding(spec: TensorSpec, qtype: QuantType) -> bool:
    """Whether only one sequence of bytes is right: moved bits, widened or rounded numbers."""
    return qtype in _FLOATS or qtype.name == spec.source_type


class Pair:
    """Both sides of a check; reading is safe from several threads.

    Args:
        source: the checkpoint.
        files, content: the GGUF.
        imatrix: what the file was quantized with, where known.
    """

    def __init__(self, source: Source, files: GgufSet, content: GgufBytes, imatrix: Imatrix | None) -> None:
        self.source = source
        self.imatrix = imatrix
        self._places: Mapping[str, tuple[int, GgufTensor]] = {
            tensor.name: (number, tensor) for number, header in enumerate(files.headers) for tensor in header.tensors
        }
        self._content = content

    def expected(self, spec: TensorSpec, begin: int, end: int) -> Rows:
        """Rows [begin, end) as the checkpoint makes them."""
        return read_rows(self.source, spec, begin, end)

    def found(self, name: str, begin: int, end: int) -> U8Array:
        """Rows [begin, end) as the file holds them, U8 [rows, bytes of a row]."""
        number, tensor = self._places[name]
        width = row_bytes(tensor.qtype, tensor.shape[-1])
        data = np.empty((end - begin) * width, dtype=np.uint8)
        self._content.read_into(number, tensor.offset + begin * width, memoryview(data.data))
        return data.reshape(end - begin, width)

    def weighed(self, spec: TensorSpec) -> bool:
        """Whether the importance matrix has something to say about a tensor."""
        return self.imatrix is not None and self.imatrix.check(spec.name, spec.shape)

    def importance(self, spec: TensorSpec, row: int) -> F32Array | None:
        """Importance of the columns of the matrix that holds ``row``."""
        if self.imatrix is None:
            return None
        matrix = row * math.prod(spec.shape[:-2]) // row_count(spec)
        return self.imatrix.importance_of(spec.name, spec.shape, matrix)

    def candidates(self, spec: TensorSpec, qtype: QuantType) -> tuple[Candidate, ...]:
        """The encoders that may have made a tensor; none where ggml cannot write the type."""
        encoders: list[Encoder] = ["ggml"] if qtype in ggml.ENCODABLE else []
        if spec.source_type == "MXFP4" and native.supports("MXFP4", qtype):
            encoders.append("native")
        weighed = (True, False) if self.weighed(spec) else (False,)
        return tuple(
            Candidate(encoder, flag)
            for flag in weighed
            for encoder in encoders
            if flag or qtype not in ggml.NEEDS_IMPORTANCE
        )

    def encoded(self, spec: TensorSpec, qtype: QuantType, how: Candidate, rows: Rows, begin: int) -> U8Array:
        """``rows``, which begin at row ``begin``, as ``how`` encodes them."""
        importance = self.importance(spec, begin) if how.weighed else None
        return encode(rows, qtype, encoder=how.encoder, importance=importance)


def compare_exactly(pair: Pair, spec: TensorSpec, qtype: QuantType, how: Candidate, begin: int, end: int) -> Compared:
    """Compare rows byte for byte with what ``how`` makes of the checkpoint's."""
    rows = pair.expected(spec, begin, end)
    found = pair.found(spec.name, begin, end)
    right = pair.encoded(spec, qtype, how, rows, begin)
    wrong = (found != right).any(axis=1)
    if spec.transform == "decay" and wrong.any():
        # exp is rounded differently by different libraries, in the last place.
        wrong &= ~_close(found.view(np.float32), right.view(np.float32)).all(axis=1)
    bad = tuple((begin + np.flatnonzero(wrong)).tolist())
    if not bad and has_one_encoding(spec, qtype):
        return Compared(end - begin, ())
    error2, norm2 = _errors(ggml.decode(found, qtype, spec.shape[-1]), to_float(rows))
    return Compared(end - begin, bad, float(error2.sum()), float(norm2.sum()))


def compare_within_bounds(pair: Pair, spec: TensorSpec, qtype: QuantType, begin: int, end: int) -> Compared:
    """Compare rows, of one expert if any, by the error of their values.

    What the type can be expected to do is what ggml's own encoder does to the same rows. A row is wrong when one of
    its blocks is off by several times that, and all are when their common error is.
    """
    values = to_float(pair.expected(spec, begin, end))
    columns = spec.shape[-1]
    decoded = ggml.decode(pair.found(spec.name, begin, end), qtype, columns)
    uniform = np.ones(columns, dtype=np.float32) if qtype in ggml.NEEDS_IMPORTANCE else None
    reference = ggml.decode(ggml.encode(values, qtype, uniform), qtype, columns)
    width = 32 if block_size(qtype) == 32 else math.gcd(columns, 256)
    error2, norm2 = _errors(decoded, values, width)
    reference2, _ = _errors(reference, values, width)
    finite = np.isfinite(decoded).all(axis=1)
    total, norm, usual = (float(x.sum()) for x in (error2, norm2, reference2))
    if not math.sqrt(total) <= allowed_error(qtype, usual, norm, weighed=True) * math.sqrt(norm):
        wrong = np.ones(end - begin, dtype=bool)
    else:
        typical = np.maximum(reference2, norm2 * (usual / norm if norm else 0.0))
        limit = np.minimum(typical * _BLOCK_FACTOR**2, norm2 * _BLOCK_WORST**2)
        wrong = (error2 > np.maximum(limit, 2 * reference2) + 1e-30).any(axis=1) | ~finite
    return Compared(end - begin, tuple((begin + np.flatnonzero(wrong)).tolist()), total, norm, usual)


def allowed_error(qtype: QuantType, reference2: float, norm2: float, *, weighed: bool) -> float:
    """Relative error that a type explains, from what ggml's encoder does to the same values."""
    usual = math.sqrt(reference2 / norm2) if norm2 else 0.0
    return (_FACTOR_WEIGHED if weighed else _FACTOR) * usual + _SLACK


def _errors(found: F32Array, values: F32Array, width: int | None = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sums of squares of the difference and of ``values``, F64 [rows, blocks of ``width`` columns]."""
    width = width or values.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = found.astype(np.float64) - values
        shape = (len(values), -1, width)
        error2 = np.square(difference).reshape(shape).sum(axis=2)
        norm2 = np.square(values.astype(np.float64)).reshape(shape).sum(axis=2)
    return np.nan_to_num(error2, nan=np.inf), norm2


def _close(a: F32Array, b: F32Array) -> npt.NDArray[np.bool_]:
    """Whether float32 numbers differ by no more than a few units in the last place."""
    near: npt.NDArray[np.bool_] = np.abs(a - b) <= _ROUNDING_ULPS * np.spacing(np.abs(b))
    return near
