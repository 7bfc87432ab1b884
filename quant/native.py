"""Our own encoders from MXFP4 codes to ggml blocks: the C library in ``quant/kernels``, called through ctypes.

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
from quant.errors import InputError, UsageError
from quant.kernels import load_library
from quant.tensors import F32Array, Mxfp4Rows, U8Array
from quant.types import QuantType, row_bytes

SourceKind = Literal["MXFP4", "BF16", "F32"]

ISA_VARIABLE = "KIMI_GGUF_ISA"
_ISAS = {"scalar": 0, "avx2": 1, "avx512": 2, "neon": 3}
_PREFERENCE = ("avx512", "neon", "avx2", "scalar")


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
    """Whether ``encode`` turns rows of ``kind`` into ``qtype``; only MXFP4 sources are."""
    return kind == "MXFP4" and bool(_library().kq_supports(int(qtype)))


def encode(rows: Mxfp4Rows, qtype: QuantType, importance: F32Array | None = None) -> U8Array:
    """Blocks of ``qtype`` for ``rows``; see ``encode_with_stats``."""
    return encode_with_stats(rows, qtype, importance)[0]


def encode_with_stats(
    rows: Mxfp4Rows, qtype: QuantType, importance: F32Array | None = None
) -> tuple[U8Array, EncodeStats]:
    """Encode MXFP4 rows as ``qtype``, exactly where the format can hold the values, else with the least error found.

    Args:
        rows: packed codes U8 [r, c / 2] and scales U8 [r, c / 32].
        qtype: a type for which ``supports("MXFP4", qtype)``.
        importance: F32 [c], weight of each column's squared error, finite and not negative; None weighs all equally.

    Returns:
        The blocks, U8 [r, bytes of a row], and what happened to them.

    Raises:
        UsageError: unsupported type, columns not a whole number of blocks, shapes that do not fit together.
        ValueFault: a scale of 255 (NaN) or a weight beyond float32; carries the row, as ``mxfp4.check_scales`` does.
        InputError: importance of another length, negative or not finite.
    """
    row_count, columns = _checked_shape(rows)
    out = np.empty((row_count, row_bytes(qtype, columns)), dtype=np.uint8)
    return out, encode_into(rows, qtype, out, importance)


def encode_into(rows: Mxfp4Rows, qtype: QuantType, out: U8Array, importance: F32Array | None = None) -> EncodeStats:
    """As ``encode_with_stats``, into ``out``: contiguous U8 [r, bytes of a row]; undefined after an error."""
    library = _library()
    isa = _ISAS[current_isa()]
    row_count, columns = _checked_shape(rows)
    if not library.kq_supports(int(qtype)):
        raise UsageError(f"the native encoder does not write {qtype.name}", "use the ggml encoder for this type")
    expected = (row_count, row_bytes(qtype, columns))
    if out.shape != expected or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError(
            f"{qtype.name} blocks need a writable contiguous U8 array of shape {expected}, not {out.shape}"
        )
    weights = None if importance is None else _checked_importance(importance, columns)
    packed = np.ascontiguousarray(rows.packed)
    scales = np.ascontiguousarray(rows.scales)
    stats = _Stats()
    result = library.kq_encode(
        int(qtype),
        isa,
        packed.ctypes.data,
        scales.ctypes.data,
        row_count,
        columns,
        None if weights is None else weights.ctypes.data,
        out.ctypes.data,
        ctypes.byref(stats),
    )
    if result:
        mxfp4.check_scales(rows)
        raise InputError(
            f"the encoder for {qtype.name} failed on {row_count} rows of {columns} weights (code {result})",
            "free some memory, or use the ggml encoder",
        )
    return EncodeStats(stats.blocks, stats.exact, stats.clipped)


def _checked_shape(rows: Mxfp4Rows) -> tuple[int, int]:
    """Rows and columns of ``rows``, whose two arrays must agree."""
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
