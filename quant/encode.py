"""From a checkpoint's rows to the bytes of a GGUF tensor.

A type that the source has already is a move of bits; everything else is decoded exactly and encoded once. One call
is single-threaded and has no state, so callers run it from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from quant import ggml, mxfp4, native
from quant.errors import UsageError, ValueFault
from quant.native import EncodeStats
from quant.tensors import Bf16Rows, F32Array, F32Rows, Mxfp4Rows, Rows, U8Array
from quant.types import QuantType

Encoder = Literal["ggml", "native"]


def encode(
    rows: Rows,
    qtype: QuantType,
    *,
    encoder: Encoder,
    importance: F32Array | None = None,
    tally: Callable[[EncodeStats], object] = lambda stats: None,
) -> U8Array:
    """Encode rows of one matrix.

    Args:
        rows: MXFP4, BF16 or F32 rows, [rows, columns].
        qtype: type to write.
        encoder: ``ggml`` gives the bytes of llama-quantize; ``native`` is ours where it has an encoder, else ggml's.
        importance: F32 [columns], weight of each column's squared error; one expert's, as rows are.
        tally: told what our encoder did to its blocks, where it is the one that encodes.

    Returns:
        U8 [rows, bytes of a row].

    Raises:
        ValueFault: a NaN scale, a weight that is not finite or out of the type's range; carries the row.
        InputError: the type needs importance, or importance does not fit.
        UsageError: no encoder for the type, or rows that are not whole blocks.
    """
    if encoder not in ("ggml", "native"):
        raise UsageError(f"unknown encoder {encoder!r}", "encoders: ggml, native")
    match rows:
        case Mxfp4Rows():
            if qtype is QuantType.MXFP4:
                return _repack(rows)
            if encoder == "native" and native.supports("MXFP4", qtype):
                mxfp4.check_scales(rows)
                return _native(rows, qtype, importance, tally)
        case Bf16Rows() if qtype is QuantType.BF16:
            check_bf16(rows)
            return _bytes(rows.bits)
        case F32Rows() if qtype is QuantType.F32:
            _check_f32(rows)
            return _bytes(rows.values)
        case Bf16Rows() if encoder == "native" and native.supports("BF16", qtype):
            check_bf16(rows)
            return _native(rows, qtype, importance, tally)
        case F32Rows() if encoder == "native" and native.supports("F32", qtype):
            _check_f32(rows)
            return _native(rows, qtype, importance, tally)
    return ggml.encode(to_float(rows), qtype, importance)


def _native(
    rows: Rows, qtype: QuantType, importance: F32Array | None, tally: Callable[[EncodeStats], object]
) -> U8Array:
    data, stats = native.encode_with_stats(rows, qtype, importance)
    tally(stats)
    return data


def to_float(rows: Rows) -> F32Array:
    """The exact values of ``rows``, F32 [rows, columns]; BF16 and F32 may hold any bit pattern.

    Raises:
        ValueFault: an MXFP4 scale that is NaN or beyond float32.
    """
    match rows:
        case Mxfp4Rows():
            return mxfp4.decode(rows)
        case Bf16Rows():
            return (rows.bits.astype(np.uint32) << 16).view(np.float32)
        case F32Rows():
            return rows.values


def check_bf16(rows: Bf16Rows) -> None:
    """Refuse infinities and NaN.

    Raises:
        ValueFault: carries the row of the first.
    """
    # The sign shifted out, a non-finite number is any whose exponent bits are all ones: the largest values there are.
    magnitudes = rows.bits << 1
    if magnitudes.size and int(magnitudes.max()) >= 0xFF00:
        _refuse(np.argwhere(magnitudes >= 0xFF00)[0])


def _check_f32(rows: F32Rows) -> None:
    # A reduction carries NaN along, and needs no temporary of the tensor's size.
    values = rows.values
    if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
        _refuse(np.argwhere(~np.isfinite(values))[0])


def _refuse(place: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> None:
    row, column = (int(i) for i in place)
    hint = "the checkpoint is damaged or its training diverged"
    raise ValueFault(f"the weight in column {column} is not a finite number", hint, row)


def _repack(rows: Mxfp4Rows) -> U8Array:
    mxfp4.check_scales(rows)
    if native.supports("MXFP4", QuantType.MXFP4):
        return native.encode(rows, QuantType.MXFP4)
    return mxfp4.repack(rows)


def _bytes(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> U8Array:
    return np.ascontiguousarray(array).view(np.uint8)
