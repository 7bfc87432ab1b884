"""Latent mixture of experts: a sigmoid router on the hidden state, experts in a narrower latent space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from convert.config import MoeConfig
from kimi_gguf.reference.ops import linear, rms_norm
from kimi_gguf.reference.situ import MlpWeights, mlp

ExpertSource = Callable[[int], MlpWeights]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """All of a MoE layer but its routed experts; d = hidden, z = latent, E experts.

    Attributes:
        router: float32 [E, d]; bias: float32 [E], added for the choice only.
        down: [z, d], into the latent space; up: [d, z], out of it; norm: [z], or None.
        shared: the shared experts as one MLP, or None.
    """

    router: Tensor
    bias: Tensor | None
    down: Tensor
    up: Tensor
    norm: Tensor | None
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class Routing:
    """Choices of a router: ids and weights [B, T, used], probabilities before the bias [B, T, E]."""

    ids: Tensor
    weights: Tensor
    probabilities: Tensor


def route(x: Tensor, router: Tensor, bias: Tensor | None, config: MoeConfig) -> Routing:
    """The experts of each token of x [B, T, d] and their weights.

    The bias takes part in the choice, never in the weights. With groups, each group is rated by the sum of its two
    best biased scores and only the best groups take part.
    """
    logits = linear(x, router)
    probabilities = torch.sigmoid(logits) if config.gating == "sigmoid" else torch.softmax(logits, dim=-1)
    biased = (probabilities if bias is None else probabilities + bias).detach()
    if config.groups is not None and config.groups_used is not None and config.groups_used < config.groups:
        grouped = torch.unflatten(biased, -1, (config.groups, -1))
        rating = grouped.topk(2, dim=-1).values.sum(-1)
        keep = torch.zeros_like(rating, dtype=torch.bool)
        keep.scatter_(-1, rating.topk(config.groups_used, dim=-1).indices, True)
        biased = grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = biased.topk(config.used, dim=-1).indices
    weights = probabilities.gather(-1, ids)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids, weights * config.scaling, probabilities)


def run_experts(z: Tensor, routing: Routing, expert: ExpertSource, beta: float, linear_beta: float | None) -> Tensor:
    """Weighted sum of the chosen experts, z [B, T, latent] -> [B, T, latent].

    Only chosen experts are asked for, one at a time, in ascending order.
    """
    flat = z.flatten(0, -2)
    ids = routing.ids.flatten(0, -2)
    used = ids.shape[-1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=1).tolist()
    token = order // used
    gathered = flat[token]
    parts = []
    begin = 0
    for e, count in enumerate(counts):
        if count:
            parts.append(mlp(gathered[begin : begin + count], expert(e), beta, linear_beta))
            begin += count
    scaled = torch.cat(parts) * routing.weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(flat).index_add(0, token, scaled).view(z.shape)


def latent_moe(
    x: Tensor,
    weights: MoeWeights,
    expert: ExpertSource,
    config: MoeConfig,
    *,
    eps: float,
    beta: float,
    linear_beta: float | None,
) -> tuple[Tensor, Routing]:
    """One MoE FFN on the normed hidden states x [B, T, d]: result [B, T, d] and the router's choices."""
    routing = route(x, weights.router, weights.bias, config)
    y = run_experts(linear(x, weights.down), routing, expert, beta, linear_beta)
    if weights.norm is not None:
        y = rms_norm(y, weights.norm, eps)
    out = linear(y, weights.up)
    if weights.shared is not None:
        out = out + mlp(x, weights.shared, beta, linear_beta)
    return out, routing
