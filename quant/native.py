"""Our own encoders to ggml blocks, from MXFP4 codes and from floats: the C library in ``quant/kernels``, by ctypes.

The library is single-threaded and without state; ctypes releases the interpreter lock, so callers run it from several
threads at once. The instruction set is chosen at run time and never changes a byte of the output;
``KIMI_GGUF_ISA=scalar|avx2|avx512|neon`` forces one.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from quant import mxfp4
from quant.errors import InputError, UsageError, ValueFault
from quant.ggml import TOO_LARGE_HINT
from quant.kernels import load_library
from quant.tensors import Bf16Rows, F32Array, F32Rows, Mxfp4Rows, Rows, U8Array
from quant.types import QuantType, row_bytes

SourceKind = Literal["MXFP4", "BF16", "F32"]

ISA_VARIABLE = "KIMI_GGUF_ISA"
_ISAS = {"scalar": 0, "avx2": 1, "avx512": 2, "neon": 3}
_PREFERENCE = ("avx512", "neon", "avx2", "scalar")

# Smallest and largest weight: the largest fp16 number times the largest index of a minimum, or of a scale and quant.
_RANGE = {
    QuantType.Q6_K: (-65504.0 * 128 * 32, 65504.0 * 128 * 32),
    QuantType.Q5_K: (-65504.0 * 63, 65504.0 * 63 * 31),
    QuantType.Q4_K: (-65504.0 * 63, 65504.0 * 63 * 15),
    QuantType.Q3_K: (-65504.0 * 32 * 4, 65504.0 * 32 * 4),
    QuantType.Q2_K: (-65504.0 * 15, 65504.0 * 15 * 3),
}


class _Stats(ctypes.Structure):
    _fields_ = (("blocks", ctypes.c_int64), ("exact", ctypes.c_int64), ("clipped", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """What an encoding did to its blocks.

    Attributes:
        blocks: blocks written; super-blocks of 256 weights for the K types, else blocks of 32.
        exact: blocks that decode to the very values of the source.
        clipped: blocks whose scale lies outside fp16's normal range, so that precision was lost.
    """

    blocks: int = 0
    exact: int = 0
    clipped: int = 0

    def __add__(self, other: EncodeStats) -> EncodeStats:
        return EncodeStats(self.blocks + other.blocks, self.exact + other.exact, self.clipped + other.clipped)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library()
    byte_pointer = ctypes.c_void_p
    library.kq_isa_available.argtypes = [ctypes.c_int32]
    library.kq_isa_available.restype = ctypes.c_int32
    library.kq_supports.argtypes = [ctypes.c_int32]
    library.kq_supports.restype = ctypes.c_int32
    library.kq_encode.argtypes = [
        ctypes.c_int32,
        ctypes.c_int32,
        byte_pointer,
        byte_pointer,
        ctypes.c_int64,
        ctypes.c_int64,
        byte_pointer,
        byte_pointer,
        ctypes.POINTER(_Stats),
    ]
    library.kq_encode.restype = ctypes.c_int64
    library.kq_supports_floats.argtypes = [ctypes.c_int32]
    library.kq_supports_floats.restype = ctypes.c_int32
    library.kq_encode_floats.argtypes = [
        ctypes.c_int32,
        ctypes.c_int32,
        byte_pointer,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int64,
        byte_pointer,
        byte_pointer,
        ctypes.POINTER(_Stats),
    ]
    library.kq_encode_floats.restype = ctypes.c_int64
    return library


def available_isas() -> tuple[str, ...]:
    """Names of the instruction sets that this processor and this build can run, best first."""
    library = _library()
    return tuple(name for name in _PREFERENCE if library.kq_isa_available(_ISAS[name]))


def current_isa() -> str:
    """The instruction set that ``encode`` uses: the one that ``KIMI_GGUF_ISA`` names, else the best available.

    Raises:
        UsageError: the variable names an instruction set that is unknown or that this machine lacks.
    """
    return _resolve_isa(os.environ.get(ISA_VARIABLE, ""))


@lru_cache(maxsize=16)
def _resolve_isa(requested: str) -> str:
    available = available_isas()
    if not requested:
        return available[0]
    if requested not in available:
        problem = "this machine cannot run it" if requested in _ISAS else "there is no such instruction set"
        raise UsageError(
            f"{ISA_VARIABLE}={requested}: {problem}", f"available here: {', '.join(available)}; or unset {ISA_VARIABLE}"
        )
    return requested


def supports(kind: SourceKind, qtype: QuantType) -> bool:
    """Whether ``encode`` turns rows of ``kind`` into ``qtype``: from floats only Q6_K, Q5_K, Q4_K, Q3_K and Q2_K."""
    library = _library()
    return bool(library.kq_supports(int(qtype)) if kind == "MXFP4" else library.kq_supports_floats(int(qtype)))


def encode(rows: Rows, qtype: QuantType, importance: F32Array | None = None) -> U8Array:
    """Blocks of ``qtype`` for ``rows``; see ``encode_with_stats``."""
    return encode_with_stats(rows, qtype, importance)[0]


def encode_with_stats(rows: Rows, qtype: QuantType, importance: F32Array | None = None) -> tuple[U8Array, EncodeStats]:
    """Encode rows as ``qtype``, MXFP4 exactly where the format can hold the values, else with the least error found.

    Args:
        rows: MXFP4 codes U8 [r, c / 2] and scales U8 [r, c / 32], or BF16 or F32 [r, c], all of them finite.
        qtype: a type that ``supports`` names for this kind of rows.
        importance: F32 [c], weight of each column's squared error, finite and not negative; None weighs all equally.

    Returns:
        The blocks, U8 [r, bytes of a row], and what happened to them.

    Raises:
        UsageError: unsupported type, columns not a whole number of blocks, shapes that do not fit together.
        ValueFault: a scale of 255 (NaN) or a weight beyond float32, as ``mxfp4.check_scales`` says; a float that is
            larger than anything ``qtype`` can hold; carries the row.
        InputError: importance of another length, negative or not finite.
    """
    row_count, columns = _checked_shape(rows)
    out = np.empty((row_count, row_bytes(qtype, columns)), dtype=np.uint8)
    return out, encode_into(rows, qtype, out, importance)


def encode_into(rows: Rows, qtype: QuantType, out: U8Array, importance: F32Array | None = None) -> EncodeStats:
    """As ``encode_with_stats``, into ``out``: contiguous U8 [r, bytes of a row]; undefined after an error."""
    isa = _ISAS[current_isa()]
    row_count, columns = _checked_shape(rows)
    kind: SourceKind = "MXFP4" if isinstance(rows, Mxfp4Rows) else "BF16" if isinstance(rows, Bf16Rows) else "F32"
    if not supports(kind, qtype):
        raise UsageError(
            f"the native encoder does not turn {kind} into {qtype.name}", "use the ggml encoder for this type"
        )
    expected = (row_count, row_bytes(qtype, columns))
    if out.shape != expected or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError(
            f"{qtype.name} blocks need a writable contiguous U8 array of shape {expected}, not {out.shape}"
        )
    weights = None if importance is None else _checked_importance(importance, columns)
    weights_at = None if weights is None else weights.ctypes.data
    stats = _Stats()
    if isinstance(rows, Mxfp4Rows):
        packed, scales = np.ascontiguousarray(rows.packed), np.ascontiguousarray(rows.scales)
        source: tuple[int, ...] = packed.ctypes.data, scales.ctypes.data
        call = _library().kq_encode
    else:
        values = np.ascontiguousarray(rows.bits if isinstance(rows, Bf16Rows) else rows.values)
        _check_range(rows, qtype)
        source = values.ctypes.data, int(isinstance(rows, Bf16Rows))
        call = _library().kq_encode_floats
    result = call(int(qtype), isa, *source, row_count, columns, weights_at, out.ctypes.data, ctypes.byref(stats))
    if result:
        if isinstance(rows, Mxfp4Rows):
            mxfp4.check_scales(rows)
        raise InputError(
            f"the encoder for {qtype.name} failed on {row_count} rows of {columns} weights (code {result})",
            "free some memory, or use the ggml encoder",
        )
    return EncodeStats(stats.blocks, stats.exact, stats.clipped)


def _check_range(rows: Bf16Rows | F32Rows, qtype: QuantType) -> None:
    """Refuse weights that would be cut to the range of the type, and NaN."""
    least, most = _RANGE[qtype]
    values = rows.values if isinstance(rows, F32Rows) else (rows.bits.astype(np.uint32) << 16).view(np.float32)
    low, high = values.min(axis=1, initial=0), values.max(axis=1, initial=0)
    # Not "outside": NaN compares as neither, and a reduction carries it along.
    good = (low >= least) & (high <= most)
    if not good.all():
        row = int(np.argmin(good))
        worst = low[row] if not low[row] >= least else high[row]
        raise ValueFault(f"weight {worst:g} is too large for {qtype.name}", TOO_LARGE_HINT, row)


def _checked_shape(rows: Rows) -> tuple[int, int]:
    """Rows and columns of ``rows``; the two arrays of MXFP4 must agree."""
    if not isinstance(rows, Mxfp4Rows):
        values = rows.bits if isinstance(rows, Bf16Rows) else rows.values
        wanted = np.uint16 if isinstance(rows, Bf16Rows) else np.float32
        if values.ndim != 2 or values.dtype != wanted:
            raise UsageError(f"rows are {np.dtype(wanted)} [rows, columns], not {values.dtype} of shape {values.shape}")
        return int(values.shape[0]), int(values.shape[1])
    if rows.packed.dtype != np.uint8 or rows.scales.dtype != np.uint8:
        raise UsageError(f"MXFP4 rows are U8 arrays, not {rows.packed.dtype} and {rows.scales.dtype}")
    if rows.packed.ndim != 2 or rows.scales.shape != (rows.packed.shape[0], rows.packed.shape[1] // 16):
        raise UsageError(
            f"MXFP4 codes of shape {rows.packed.shape} do not fit scales of shape {rows.scales.shape}",
            "codes are [rows, columns / 2], scales [rows, columns / 32]",
        )
    return int(rows.packed.shape[0]), int(rows.packed.shape[1]) * 2


def _checked_importance(importance: F32Array, columns: int) -> F32Array:
    if importance.shape != (columns,):
        raise InputError(f"importance of shape {importance.shape} for rows of {columns} weights")
    weights = np.ascontiguousarray(importance, dtype=np.float32)
    low, high = float(weights.min(initial=0)), float(weights.max(initial=0))
    if not (np.isfinite(high) and low >= 0):
        raise InputError(f"importance ranges from {low} to {high}: it must be finite and not negative")
    return weights
