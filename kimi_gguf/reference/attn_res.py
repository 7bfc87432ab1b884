"""Attention residuals: each sublayer reads a softmax mixture of earlier blocks instead of one running sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Stream:
    """What travels from layer to layer, per token.

    Attributes:
        residual: [B, T, d], the running sum since the last commit.
        blocks: committed sums, [B, T, d] each, raw.
        selection: bool [B, T, S], the keys that the latest indexer chose; layers without an indexer reuse it.
    """

    residual: Tensor
    blocks: list[Tensor] = field(default_factory=list)
    selection: Tensor | None = None


def mix(blocks: Sequence[Tensor], residual: Tensor, score: Tensor, eps: float) -> Tensor:
    """Softmax mixture of the committed blocks and the running sum, [B, T, d].

    Args:
        score: [d], the product of the residual norm's weight and the score projection.
        eps: of the RMS under each score; the values that are mixed are not normalised.
    """
    values = torch.stack((*blocks, residual))
    scores = (values @ score) * torch.rsqrt(values.square().mean(-1) + eps)
    return (torch.softmax(scores, dim=0).unsqueeze(-1) * values).sum(0)
