"""MXFP4, exactly: decoding, the move to and from ggml's blocks, and an encoder for synthetic weights.

A block is 32 four-bit codes and one E8M0 scale byte. Code bit 3 is the sign, bits 0 to 2 are E2M1
(0, 0.5, 1, 1.5, 2, 3, 4, 6); the multiplier is ``2 ** (scale - 127)``, and 255 is NaN by the OCP definition.
compressed-tensors packs neighbours (element 2c low, 2c + 1 high); ggml's ``block_mxfp4`` packs halves
(element j low, j + 16 high) behind the scale byte. Both hold the same codes, so changing one into the other
moves bits and touches no value.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from quant.errors import UsageError, ValueFault
from quant.tensors import F32Array, Mxfp4Rows, U8Array

BLOCK: Final = 32
BLOCK_BYTES: Final = 17

_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
LEVELS: Final[F32Array] = np.concatenate([_MAGNITUDES, np.array([0.0], np.float32), -_MAGNITUDES[1:]])
"""F32 [16]: the value of each code; code 8, the negative zero, is +0.0."""

# Both nibbles of a byte decode with one look-up: F32 [256, 2], read as one 64-bit word.
_PAIRS = np.stack([LEVELS[np.arange(256) & 15], LEVELS[np.arange(256) >> 4]], axis=1).view(np.uint64).reshape(256)
_MULTIPLIERS = np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32)

# The smallest magnitude code (bits 0 to 2) that no longer fits float32, by scale byte.
_OVERFLOWING = {253: 6, 254: 4}

# Magnitudes at or above bound k round to code k + 1; ties go to the even code, so every other bound is open.
_MIDPOINTS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / np.float32(2)
_BOUNDS = np.where(np.arange(7) % 2 == 0, np.nextafter(_MIDPOINTS, np.float32(np.inf)), _MIDPOINTS)


def check_scales(rows: Mxfp4Rows) -> None:
    """Refuse scales that are NaN (255) or that take one of their codes beyond float32 (253 and 254).

    Raises:
        ValueFault: carries the row; names the columns of the block and the scale byte.
    """
    _check_shapes(rows)
    if rows.scales.size == 0 or int(rows.scales.max()) < 253:
        return
    for row, block in np.argwhere(rows.scales >= 253):
        scale = int(rows.scales[row, block])
        where = f"of columns {int(block) * BLOCK} to {int(block) * BLOCK + BLOCK - 1}"
        hint = "the checkpoint is damaged; download the shard again"
        if scale == 255:
            raise ValueFault(f"scale byte 255 {where} is NaN", hint, int(row))
        codes = rows.packed[row, block * 16 : block * 16 + 16]
        if max(int((codes & 7).max()), int((codes >> 4 & 7).max())) >= _OVERFLOWING[scale]:
            raise ValueFault(f"scale byte {scale} {where} takes its codes beyond float32", hint, int(row))


def decode(rows: Mxfp4Rows) -> F32Array:
    """The exact values of packed rows, F32 [rows, columns].

    Raises:
        ValueFault: as ``check_scales``.
    """
    check_scales(rows)
    count, half = rows.packed.shape
    values = _PAIRS[rows.packed].view(np.float32).reshape(count, half // 16, BLOCK)
    values *= _MULTIPLIERS[rows.scales][:, :, None]
    return values.reshape(count, half * 2)


def repack(rows: Mxfp4Rows) -> U8Array:
    """The same codes and scales as ggml ``block_mxfp4``, U8 [rows, columns / 32 * 17]; scales are not checked."""
    _check_shapes(rows)
    count, blocks = rows.scales.shape
    packed = rows.packed.reshape(count, blocks, 2, 8)
    first, second = packed[:, :, 0], packed[:, :, 1]
    out = np.empty((count, blocks, BLOCK_BYTES), dtype=np.uint8)
    out[:, :, 0] = rows.scales
    out[:, :, 1::2] = first & 15 | second << 4
    out[:, :, 2::2] = first >> 4 | second & 0xF0
    return out.reshape(count, blocks * BLOCK_BYTES)


def unpack(blocks: U8Array) -> Mxfp4Rows:
    """The inverse of ``repack``.

    Args:
        blocks: U8 [rows, columns / 32 * 17].

    Raises:
        UsageError: the rows are not whole blocks.
    """
    if blocks.ndim != 2 or blocks.shape[1] % BLOCK_BYTES:
        raise UsageError(f"MXFP4 rows of shape {blocks.shape} are not whole blocks of {BLOCK_BYTES} bytes")
    count, width = blocks.shape
    shaped = blocks.reshape(count, width // BLOCK_BYTES, BLOCK_BYTES)
    even, odd = shaped[:, :, 1::2], shaped[:, :, 2::2]
    packed = np.empty((count, width // BLOCK_BYTES, 2, 8), dtype=np.uint8)
    packed[:, :, 0] = even & 15 | odd << 4
    packed[:, :, 1] = even >> 4 | odd & 0xF0
    return Mxfp4Rows(packed.reshape(count, -1), shaped[:, :, 0].copy())


def quantize(values: F32Array, rule: Literal["floor", "ceil"] = "ceil") -> Mxfp4Rows:
    """Round float rows to MXFP4, nearest level, ties to the even code.

    Args:
        values: F32 [rows, columns], columns a multiple of 32.
        rule: how a block's exponent follows from its largest magnitude m: ``floor`` is the OCP rule
            floor(log2 m) - 2, which saturates above 6; ``ceil`` is ceil(log2(m / 6)), which never does.
            Both are clamped to -127 .. 127; an all-zero block gets scale byte 127.

    Raises:
        UsageError: columns are not whole blocks.
        ValueFault: a value is not finite.
    """
    if values.ndim != 2 or values.shape[1] % BLOCK:
        raise UsageError(f"values of shape {values.shape} are not rows of whole blocks of {BLOCK}")
    count, columns = values.shape
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(count, columns // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=2, initial=0)
    if not np.isfinite(largest).all():
        raise ValueFault("a value is not finite", row=int(np.argwhere(~np.isfinite(largest))[0, 0]))
    mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2^exponent, 0.5 <= mantissa < 1
    shift = exponent - 3 if rule == "floor" else exponent - 2 - (mantissa <= 0.75)
    shift = np.where(largest == 0, 0, np.clip(shift, -127, 127)).astype(np.int32)
    scaled = np.ldexp(blocks, -shift[:, :, None])
    codes = np.searchsorted(_BOUNDS, np.abs(scaled), side="right").astype(np.uint8)
    codes |= np.signbit(blocks).astype(np.uint8) << 3
    pairs = codes.reshape(count, columns // 2, 2)
    return Mxfp4Rows(pairs[:, :, 0] | pairs[:, :, 1] << 4, (shift + 127).astype(np.uint8))


def _check_shapes(rows: Mxfp4Rows) -> None:
    packed: tuple[int, ...] = rows.packed.shape
    scales: npt.NDArray[np.uint8] = rows.scales
    if len(packed) != 2 or scales.shape != (packed[0], packed[1] // 16) or packed[1] % 16:
        raise UsageError(f"packed codes {packed} and scales {scales.shape} do not fit: 16 code bytes to a scale")
