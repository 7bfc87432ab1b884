"""SiTU, the gated activation of every FFN, and the three-matrix MLP around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_gguf.reference.ops import linear


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``, elementwise.

    ``linear_beta`` None leaves ``up`` unbounded.
    """
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """``gate`` and ``up`` [width, in], ``down`` [out, width]: of a dense FFN, shared experts, or one expert."""

    gate: Tensor
    up: Tensor
    down: Tensor


def mlp(x: Tensor, weights: MlpWeights, beta: float, linear_beta: float | None) -> Tensor:
    """``down situ(gate x, up x)``, x [..., in] -> [..., out]."""
    return linear(situ(linear(x, weights.gate), linear(x, weights.up), beta, linear_beta), weights.down)
