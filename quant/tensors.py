"""What the ground floor needs to know of a tensor: its class, its shape, and rows of its values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]
U16Array = npt.NDArray[np.uint16]
F32Array = npt.NDArray[np.float32]


class TensorClass(StrEnum):
    """The part that a tensor plays in the model; recipes and reports speak in these."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    NORM = "norm"
    RESIDUAL_SCORE = "residual score"
    KDA_PROJECTION = "KDA projection"
    KDA_LOW_RANK = "KDA low-rank"
    KDA_CONV = "KDA convolution"
    KDA_STATE = "KDA state"
    MLA_PROJECTION = "MLA projection"
    MLA_ABSORBED = "MLA absorbed"
    ATTENTION_GATE = "attention gate"
    ATTENTION_OUTPUT = "attention output"
    INDEXER = "indexer"
    INDEXER_WEIGHTS = "indexer head weights"
    DENSE_FFN = "dense FFN"
    ROUTER = "router"
    ROUTER_BIAS = "router bias"
    LATENT_PROJECTION = "latent projection"
    SHARED_EXPERT = "shared expert"
    ROUTED_EXPERT = "routed expert"


@dataclass(frozen=True, slots=True)
class RecipeTensor:
    """One output tensor as a recipe sees it.

    Attributes:
        name: GGUF name, for example ``blk.3.ffn_down_exps.weight``.
        cls: the tensor's class.
        shape: row-major shape, last axis contiguous (ggml's ``ne`` reversed).
        layer: 0-based decoder layer, None for global tensors.
        source_type: MXFP4, BF16 or F32: what the checkpoint holds.
    """

    name: str
    cls: TensorClass
    shape: tuple[int, ...]
    layer: int | None
    source_type: str


@dataclass(frozen=True, slots=True)
class Mxfp4Rows:
    """Rows of MXFP4 weights as compressed-tensors packs them.

    Attributes:
        packed: U8 [rows, columns / 2]; the low nibble of byte c is element 2c, the high one element 2c + 1.
        scales: U8 [rows, columns / 32]; E8M0, multiplier 2 ** (scale - 127).
    """

    packed: U8Array
    scales: U8Array


@dataclass(frozen=True, slots=True)
class Bf16Rows:
    """Rows of BF16 weights as raw bits, U16 [rows, columns]."""

    bits: U16Array


@dataclass(frozen=True, slots=True)
class F32Rows:
    """Rows of float32 weights, F32 [rows, columns]."""

    values: F32Array


Rows = Mxfp4Rows | Bf16Rows | F32Rows
