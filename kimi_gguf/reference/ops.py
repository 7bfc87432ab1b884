"""Linear maps and normalisations shared by the blocks; float32 in, float32 out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [..., in] times ``weight`` [out, in] transposed, float32 [..., out].

    The product is computed in the weight's dtype: float32 for the reference, BF16 where a trainer hands in BF16.
    """
    return functional.linear(x.to(weight.dtype), weight).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm with mean subtraction over the last axis."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis: eps is added to the sum, not to the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
