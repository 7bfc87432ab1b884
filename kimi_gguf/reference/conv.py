"""The short causal convolution in front of KDA's q, k and v."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def short_conv(x: Tensor, weight: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution without bias, then SiLU.

    ``out[t, c] = silu(sum_j weight[c, j] * x[t - (K - 1) + j, c])``: the last tap multiplies the current token.

    Args:
        x: float32 [B, T, C], the projections before the convolution.
        weight: float32 [C, K].
        tail: [B, K - 1, C], the projections just before ``x``; None at the start of a sequence (zeros).

    Returns:
        The activations [B, T, C] and the tail for the next call.
    """
    taps = weight.shape[-1]
    if tail is None:
        tail = x.new_zeros(x.shape[0], taps - 1, x.shape[-1])
    padded = torch.cat((tail, x), dim=1)
    length = x.shape[1]
    out = padded[:, :length] * weight[:, 0]
    for j in range(1, taps):
        out = out + padded[:, j : j + length] * weight[:, j]
    return functional.silu(out), padded[:, length:]
