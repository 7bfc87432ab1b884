"""ggml's own encoders and decoders, called through ctypes (the GIL is released).

The library is the one that ``libggml-python`` ships. ``ggml_quantize_chunk`` encodes row by row, so for equal
float input the bytes are those of ``llama-quantize``. ggml ends the process where it meets input that it does
not expect; everything that could lead there is checked first and raised as an error.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from importlib import resources
from typing import Final

import numpy as np

from quant.errors import InputError, UsageError, ValueFault
from quant.tensors import F32Array, U8Array
from quant.types import QuantType, block_bytes, block_size, parse_type, row_bytes

ENCODABLE: Final = frozenset(
    parse_type(name)
    for name in (
        *("F32", "F16", "BF16", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
        *("Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    )
)
"""Types that ``encode`` writes and ``decode`` reads."""

NEEDS_IMPORTANCE: Final = frozenset({QuantType.IQ1_S, QuantType.IQ2_XXS, QuantType.IQ2_XS})
"""Types that the library refuses to encode without importance."""

# ggml's grid searches end the process when a squared sum overflows; no real weight comes near these bounds.
_GRID_TYPES: Final = frozenset(t for t in ENCODABLE if t.name.startswith(("IQ1", "IQ2", "IQ3")))
_LARGEST_GRID_WEIGHT: Final = 1e5
_LARGEST_GRID_PRODUCT: Final = 1e15
_LARGEST_WEIGHT: Final = 1e15

TOO_LARGE_HINT: Final = "keep this tensor in BF16 with --tensor-type"
_FLOATS: Final = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})
_init_lock = threading.Lock()


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.c_void_p),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    package = resources.files("libggml")
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")
    for entry in (package / folder / name for folder in ("lib64", "lib", "bin") for name in names):
        if entry.is_file():
            library = ctypes.CDLL(str(entry))
            break
    else:
        raise InputError("libggml-python holds no libggml-base for this platform", "install libggml-python again")
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_quantize_init.restype = None
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    return library


@functools.cache
def _prepare(qtype: QuantType) -> None:
    # The IQ types build large look-up tables on first use: once, by one thread.
    with _init_lock:
        _library().ggml_quantize_init(int(qtype))


@functools.cache
def _traits(qtype: QuantType) -> _TypeTraits:
    traits: _TypeTraits = _library().ggml_get_type_traits(int(qtype)).contents
    if (traits.blck_size, traits.type_size) != (block_size(qtype), block_bytes(qtype)):
        raise InputError(
            f"libggml stores {qtype.name} as {traits.type_size} bytes per {traits.blck_size} weights,"
            f" expected {block_bytes(qtype)} per {block_size(qtype)}",
            "install the version of libggml-python that this tool names",
        )
    return traits


def encode(values: F32Array, qtype: QuantType, importance: F32Array | None = None) -> U8Array:
    """Encode float rows with ggml's encoder.

    Args:
        values: F32 [rows, columns]; columns a multiple of the type's block.
        qtype: one of ``ENCODABLE``.
        importance: F32 [columns], weight of each column's squared error, or None.

    Returns:
        U8 [rows, row_bytes(qtype, columns)].

    Raises:
        UsageError: type, shape or row width do not fit.
        InputError: the type needs importance and there is none, or importance is not finite and non-negative.
        ValueFault: a weight is not finite, or too large for the type's half-precision scales; carries the row.
    """
    if qtype not in ENCODABLE:
        raise UsageError(f"no encoder for {qtype.name}", "types: " + ", ".join(sorted(t.name for t in ENCODABLE)))
    if values.ndim != 2:
        raise UsageError(f"weights of shape {values.shape} are not rows")
    rows, columns = values.shape
    out = np.empty((rows, row_bytes(qtype, columns)), dtype=np.uint8)
    if importance is None and qtype in NEEDS_IMPORTANCE:
        raise InputError(
            f"{qtype.name} cannot be encoded without an importance matrix",
            "give --imatrix FILE with an entry for this tensor, or choose another type",
        )
    if values.size == 0:
        return out
    source = np.ascontiguousarray(values, dtype=np.float32)
    largest = _check_weights(source, qtype)
    weights = None if importance is None else _check_importance(importance, columns)
    if weights is not None and qtype in _GRID_TYPES:
        weights = _tame(weights, largest)
    _prepare(qtype)
    written = _library().ggml_quantize_chunk(
        int(qtype),
        source.ctypes.data,
        out.ctypes.data,
        0,
        rows,
        columns,
        None if weights is None else weights.ctypes.data,
    )
    if written != out.nbytes:
        raise InputError(f"libggml wrote {written} bytes of {qtype.name} where {out.nbytes} were due")
    _check_scales(out, qtype)
    return out


def decode(data: U8Array, qtype: QuantType, columns: int) -> F32Array:
    """Decode rows of ``qtype`` to F32 [rows, columns] as ggml does.

    Args:
        data: U8 [rows, row_bytes(qtype, columns)].

    Raises:
        UsageError: shape and type do not fit, or no decoder is known.
    """
    width = row_bytes(qtype, columns)
    if qtype not in ENCODABLE:
        raise UsageError(f"no decoder for {qtype.name}", "types: " + ", ".join(sorted(t.name for t in ENCODABLE)))
    if data.ndim != 2 or data.shape[1] != width:
        raise UsageError(f"data of shape {data.shape} are not {qtype.name} rows of {columns} weights ({width} bytes)")
    source = np.ascontiguousarray(data)
    if qtype is QuantType.F32:
        return source.view(np.float32).copy()
    if qtype is QuantType.F16:
        return source.view(np.float16).astype(np.float32)
    if qtype is QuantType.BF16:
        return (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    out = np.empty((data.shape[0], columns), dtype=np.float32)
    if out.size:
        _traits(qtype).to_float(source.ctypes.data, out.ctypes.data, out.size)
    return out


def _tame(importance: F32Array, largest: float) -> F32Array:
    # Only ratios of importance matter, so a power of two changes no result; it keeps the squared sums finite.
    product = float(importance.max()) * largest * largest
    if product <= _LARGEST_GRID_PRODUCT:
        return importance
    return np.ldexp(importance, -math.ceil(math.log2(product / _LARGEST_GRID_PRODUCT)))


def _check_weights(values: F32Array, qtype: QuantType) -> float:
    """The largest magnitude among ``values``."""
    # Two reductions instead of a mask: they carry NaN along and need no temporary of the tensor's size.
    low, high = float(values.min()), float(values.max())
    if np.isfinite(low) and np.isfinite(high):
        largest = max(-low, high)
        if qtype in _FLOATS or largest <= (_LARGEST_GRID_WEIGHT if qtype in _GRID_TYPES else _LARGEST_WEIGHT):
            return largest
        row = int(np.argmax(np.abs(values).max(axis=1)))
        raise ValueFault(f"weight of magnitude {largest:g} is too large for {qtype.name}", TOO_LARGE_HINT, row)
    row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
    raise ValueFault(
        f"the weight in column {column} is {values[row, column]}, not a finite number",
        "the checkpoint is damaged or its training diverged",
        row,
    )


def _check_importance(importance: F32Array, columns: int) -> F32Array:
    if importance.shape != (columns,):
        raise InputError(f"importance of shape {importance.shape} for rows of {columns} weights")
    low, high = float(importance.min()), float(importance.max())
    if not (np.isfinite(high) and low >= 0):
        raise InputError(f"importance ranges from {low} to {high}: it must be finite and not negative")
    return np.ascontiguousarray(importance, dtype=np.float32)


# Where a type keeps its half-precision scales: byte offsets inside the block.
_SCALE_OFFSETS: Final = {
    QuantType.F16: (0,),
    QuantType.Q4_0: (0,),
    QuantType.Q4_1: (0, 2),
    QuantType.Q5_0: (0,),
    QuantType.Q5_1: (0, 2),
    QuantType.Q8_0: (0,),
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q4_K: (0, 2),
    QuantType.Q5_K: (0, 2),
    QuantType.Q6_K: (208,),
    QuantType.IQ1_S: (0,),
    QuantType.IQ2_XXS: (0,),
    QuantType.IQ2_XS: (0,),
    QuantType.IQ2_S: (0,),
    QuantType.IQ3_XXS: (0,),
    QuantType.IQ3_S: (0,),
    QuantType.IQ4_NL: (0,),
    QuantType.IQ4_XS: (0,),
}


def _check_scales(encoded: U8Array, qtype: QuantType) -> None:
    """Refuse blocks whose scale left the range of its float format; a reader would make them infinite."""
    rows = encoded.shape[0]
    if qtype is QuantType.BF16:
        bad = (encoded.view(np.uint16) & 0x7F80) == 0x7F80
    elif qtype is QuantType.IQ1_M:
        # The 16 bits of the scale are the top nibbles of the four 16-bit words at byte 48; the exponent is bits 10-14.
        words = encoded.reshape(rows, -1, block_bytes(qtype))[:, :, 48:].copy().view(np.uint16)
        bad = ((words[:, :, 3] >> 12 & 7) == 7) & ((words[:, :, 2] >> 12 & 12) == 12)
    elif qtype in _SCALE_OFFSETS:
        blocks = encoded.reshape(rows, -1, block_bytes(qtype))
        bad = np.zeros(blocks.shape[:2], dtype=np.bool_)
        for offset in _SCALE_OFFSETS[qtype]:
            bad |= (blocks[:, :, offset + 1] & 0x7C) == 0x7C
    else:
        return
    if bad.any():
        raise ValueFault(f"weights are too large for {qtype.name}", TOO_LARGE_HINT, int(np.argwhere(bad)[0, 0]))
