"""The indexer of K3.1: a small attention that picks the keys which MLA may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from convert.config import DsaConfig
from kimi_gguf.reference.ops import layer_norm, linear


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """``wq_b`` [heads * head_dim, q_lora], ``wk`` [head_dim, d], ``weights`` [heads, d], key norm [head_dim] each."""

    wq_b: Tensor
    wk: Tensor
    weights: Tensor
    k_norm: Tensor
    k_bias: Tensor | None


def indexer_keys(x: Tensor, weights: IndexerWeights, eps: float) -> Tensor:
    """Keys [B, T, head_dim] of the normed hidden states x [B, T, d]."""
    return layer_norm(linear(x, weights.wk), weights.k_norm, weights.k_bias, eps)


def indexer_scores(latent: Tensor, x: Tensor, keys: Tensor, weights: IndexerWeights, config: DsaConfig) -> Tensor:
    """Scores [B, T, S] of each query for each key: sum over heads of w_h relu(q_h . k) (heads * head_dim)^-1/2.

    Args:
        latent: [B, T, q_lora], the query latent after its norm.
        x: [B, T, d], the normed hidden states.
        keys: [B, S, head_dim].
    """
    q = torch.unflatten(linear(latent, weights.wq_b), -1, (config.heads, config.head_dim))
    w = linear(x, weights.weights) * (config.heads * config.head_dim) ** -0.5
    scores: Tensor | None = None
    # One head at a time: all heads together would need heads * T * S floats.
    for h in range(config.heads):
        part = torch.relu(q[:, :, h] @ keys.transpose(1, 2)) * w[:, :, h, None]
        scores = part if scores is None else scores + part
    assert scores is not None
    return scores


def causal_mask(queries: int, keys: int) -> Tensor:
    """Bool [queries, keys]: the queries are the last ones, and each sees its own position and all before."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def select_keys(scores: Tensor, top_k: int) -> Tensor:
    """Bool [B, T, S]: the ``top_k`` best visible keys of each query, or all visible ones when there are no more.

    Equal scores at the edge: which of them is kept follows ``torch.topk`` and is not specified; compare sets by
    score threshold, or use tie-free data.
    """
    visible = causal_mask(scores.shape[-2], scores.shape[-1])
    if scores.shape[-1] <= top_k:
        return visible.expand(scores.shape)
    ranked = scores.masked_fill(~visible, float("-inf"))
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    chosen.scatter_(-1, ranked.topk(top_k, dim=-1).indices, True)
    return chosen & visible
