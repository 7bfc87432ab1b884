"""Random values for synthetic checkpoints: seeded per tensor name, fast, and tame in a forward pass.

Each tensor's generator is seeded by (seed, name), so a checkpoint holds the same values however it is sharded.
MXFP4 codes are drawn straight from the distribution that quantized Gaussian weights have: one 16-bit random number
picks a byte of two codes from a table, which makes gigabytes of experts in seconds.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import log2, sqrt

import numpy as np
import numpy.typing as npt

from quant.mxfp4 import LEVELS
from quant.tensors import F32Array, U8Array

# Spread of weights in units of their block's scale, for blocks whose largest of 32 Gaussian weights lies in (3, 6].
_SIGMA = 2.0
# Scale bytes of a tensor spread around the middle one, as in trained weights.
_SCALE_OFFSETS = np.repeat(np.array([-2, -1, 0, 1], dtype=np.int16), [16, 80, 144, 16])


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator of tensor ``name`` in the checkpoint of ``seed``."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(np.frombuffer(digest, dtype=np.uint32)))


def gaussian(rng: np.random.Generator, shape: tuple[int, ...], std: float, mean: float = 0.0) -> F32Array:
    """Normal float32 values."""
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    if mean:
        values += np.float32(mean)
    return values


@lru_cache(maxsize=1)
def _code_table() -> U8Array:
    """65,536 bytes of two codes each, as frequent as quantized N(0, sigma) weights make them."""
    samples = np.random.Generator(np.random.SFC64(4)).standard_normal((2, 1 << 16), dtype=np.float32) * _SIGMA
    level = np.argmin(np.abs(np.abs(samples)[..., None] - LEVELS[:8]), axis=-1).astype(np.uint8)
    codes = level | (np.signbit(samples).astype(np.uint8) << 3)
    return np.asarray(codes[0] | codes[1] << 4, dtype=np.uint8)


def mxfp4_packed(seed: int, stem: str, rows: int, columns: int) -> U8Array:
    """``weight_packed`` of expert matrix ``stem``: U8 [rows, columns / 2]."""
    drawn = generator(seed, stem).bytes(rows * columns)
    picks: npt.NDArray[np.uint16] = np.frombuffer(drawn, dtype="<u2")
    return _code_table()[picks].reshape(rows, columns // 2)


def mxfp4_scales(seed: int, stem: str, rows: int, columns: int) -> U8Array:
    """``weight_scale`` of expert matrix ``stem``: U8 [rows, columns / 32], for weights of spread 1 / sqrt(columns)."""
    middle = 127 + round(log2(1 / sqrt(columns) / _SIGMA))
    drawn = generator(seed, f"{stem}.scales").bytes(rows * columns // 32)
    offsets = _SCALE_OFFSETS[np.frombuffer(drawn, dtype=np.uint8)]
    return (offsets + np.int16(middle)).astype(np.uint8).reshape(rows, columns // 32)
