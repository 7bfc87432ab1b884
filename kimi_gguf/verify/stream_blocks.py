"""The sublayers of the reference, cut into pieces that fit a given memory, with a tap on every weight's input.

Heads are independent, so attention runs some heads, and some queries, at a time; the results do not depend on a second
model or on the rest of the text. A tap sees the rows that meet each weight matrix, under the matrix's GGUF name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from convert.config import DsaConfig, KdaConfig, MlaConfig, ModelConfig
from kimi_gguf.reference import mla as attention
from kimi_gguf.reference.indexer import IndexerWeights, causal_mask, indexer_keys, indexer_scores, select_keys
from kimi_gguf.reference.kda import CHUNK, KdaWeights, kda_heads
from kimi_gguf.reference.mla import MlaWeights
from kimi_gguf.reference.ops import linear
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.situ import MlpWeights, situ


class Tap(Protocol):
    """Sees the inputs of weight matrices, which it knows by their GGUF names without ``blk.N.``."""

    def rows(self, name: str, rows: Tensor, expert: int | None = None) -> None:
        """Input rows [..., in] of a matrix, or of one expert of a stack."""
        ...

    def squares(self, name: str, sums: Tensor, count: int) -> None:
        """Squares [in] of a matrix's input, summed over ``count`` rows already."""
        ...


_Weights = TypeVar("_Weights")


class NoTap:
    """Looks at nothing."""

    def rows(self, name: str, rows: Tensor, expert: int | None = None) -> None: ...

    def squares(self, name: str, sums: Tensor, count: int) -> None: ...


def to_device(weights: _Weights, device: torch.device) -> _Weights:
    """A dataclass of weights with its tensors on ``device``."""
    if device.type == "cpu":
        return weights
    moved = {
        f.name: value.to(device)
        for f in fields(weights)  # type: ignore[arg-type]
        if isinstance(value := getattr(weights, f.name), Tensor)
    }
    return replace(weights, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Limits:
    """How large temporaries may be, in bytes."""

    work: int


def run_kda(
    x: Tensor, weights: KdaWeights, config: KdaConfig, eps: float, options: Options, limits: Limits, tap: Tap
) -> Tensor:
    """One KDA sublayer on normed hidden states x [B, T, d], float32 [B, T, d]."""
    for name in ("attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_beta", "ssm_g"):
        tap.rows(f"{name}.weight", x)
    tap.rows("ssm_f_b.weight", linear(x, weights.f_a))
    l2_eps = eps if options.l2_eps is None else options.l2_eps
    # Per token and head: a dozen vectors of one head's width, and the pairs of a chunk with their temporaries.
    per_head = x.shape[0] * x.shape[1] * config.head_dim * 4 * (12 + 4 * CHUNK)
    step = max(1, min(config.heads, limits.work // per_head))
    parts = []
    for begin in range(0, config.heads, step):
        some = _some_kda_heads(weights, begin, min(begin + step, config.heads), config.head_dim)
        part = replace(config, heads=len(some.decay))
        parts.append(kda_heads(x, some, part, norm_eps=eps, l2_eps=l2_eps, form=options.kda_form))
    gated = torch.cat(parts, dim=-1)
    tap.rows("attn_output.weight", gated)
    return linear(gated, weights.o)


def _some_kda_heads(weights: KdaWeights, begin: int, end: int, width: int) -> KdaWeights:
    rows = slice(begin * width, end * width)
    return replace(
        weights,
        q=weights.q[rows],
        k=weights.k[rows],
        v=weights.v[rows],
        q_conv=weights.q_conv[rows],
        k_conv=weights.k_conv[rows],
        v_conv=weights.v_conv[rows],
        f_b=weights.f_b[rows],
        b=weights.b[begin:end],
        decay=weights.decay[begin:end],
        dt_bias=weights.dt_bias[rows],
        g=weights.g[rows],
    )


def run_mla(
    x: Tensor,
    weights: MlaWeights,
    indexer: IndexerWeights | None,
    shared_selection: Tensor | None,
    config: ModelConfig,
    options: Options,
    limits: Limits,
    tap: Tap | None,
) -> tuple[Tensor, Tensor | None]:
    """One MLA sublayer on normed hidden states x [B, T, d].

    Args:
        indexer: of the layer, or None.
        shared_selection: bool [B, T, T], the keys that an earlier indexer chose, for a layer without its own.
        tap: when given, attention runs in the absorbed form, so that ``attn_k_b`` and ``attn_v_b`` have inputs.

    Returns:
        float32 [B, T, d], and the keys chosen, bool [B, T, T]; None where all visible keys are attended to.
    """
    mla = config.mla
    see = tap or NoTap()
    eps = config.rms_norm_eps if options.latent_norm_eps is None else options.latent_norm_eps
    query = attention.query_latent(x, weights, eps)
    latent, shared = attention.key_latent(x, weights, mla, eps)
    for name in ("attn_q_a", "attn_kv_a_mqa", *(("attn_gate",) if weights.g is not None else ())):
        see.rows(f"{name}.weight", x)
    see.rows("attn_q_b.weight", query)
    selection = shared_selection
    if indexer is not None and config.dsa is not None:
        see.rows("indexer.attn_q_b.weight", query)
        see.rows("indexer.attn_k.weight", x)
        see.rows("indexer.proj.weight", x)
        selection = _select(x, query, indexer, config.dsa, options, limits)
    if config.dsa is None or not options.sparse:
        selection = None
    q = linear(query, weights.q_b)
    out = _attend_in_parts(q, latent, shared, selection, weights, mla, limits, absorbed=options.absorbed, tap=tap)
    gated = attention.gated_heads(out, x, weights)
    see.rows("attn_output.weight", gated)
    return linear(gated, weights.o), selection


def _select(
    x: Tensor, query: Tensor, indexer: IndexerWeights, dsa: DsaConfig, options: Options, limits: Limits
) -> Tensor:
    batch, length = x.shape[:2]
    keys = indexer_keys(x, indexer, options.indexer_eps)
    chosen = torch.zeros(batch, length, length, dtype=torch.bool)
    step = max(1, min(length, limits.work // (batch * length * 4 * 4)))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        part = slice(begin, end)
        scores = indexer_scores(query[:, part], x[:, part], keys[:, :end], indexer, dsa)
        chosen[:, part, :end] = select_keys(scores, dsa.top_k)
    return chosen


def _attend_in_parts(
    q: Tensor,
    latent: Tensor,
    shared: Tensor,
    selection: Tensor | None,
    weights: MlaWeights,
    config: MlaConfig,
    limits: Limits,
    *,
    absorbed: bool,
    tap: Tap | None,
) -> Tensor:
    """Attention of some heads and queries at a time, [B, T, H * v]; arguments as in ``run_mla``."""
    batch, length = q.shape[:2]
    width = config.nope + config.rope
    # Logits, their masked copy and the softmax; a query slice when a single head's are too many.
    per_query = batch * length * 4 * 3
    queries = max(1, min(length, limits.work // per_query))
    heads = max(1, min(config.heads, limits.work // (per_query * queries)))
    key_sums: list[Tensor] = []
    out = q.new_empty(batch, length, config.heads * config.v)
    for first in range(0, config.heads, heads):
        last = min(first + heads, config.heads)
        some = replace(weights, k_b=weights.k_b[first:last], v_b=weights.v_b[first:last])
        part = replace(config, heads=last - first)
        sums: Tensor | None = None
        for begin in range(0, length, queries):
            end = min(begin + queries, length)
            rows = q[:, begin:end, first * width : last * width]
            near, far = latent[:, :end], shared[:, :end]
            logits = attention.attention_logits(rows, near, far, some, part, absorbed=absorbed)
            allowed = causal_mask(end - begin, end).expand(batch, -1, -1)
            if selection is not None:
                allowed = allowed & selection[:, begin:end, :end]
            if tap is not None:
                read = attention.latent_sums(logits, allowed, near).square().sum((0, 2))
                sums = read if sums is None else sums + read
            values = attention.attend(logits, allowed, near, some, part, absorbed=absorbed)
            out[:, begin:end, first * config.v : last * config.v] = values
        if sums is not None:
            key_sums.append(sums)
    if tap is not None:
        tap.rows("attn_k_b.weight", torch.unflatten(q, -1, (config.heads, width))[..., : config.nope].flatten(2))
        tap.squares("attn_v_b.weight", torch.cat(key_sums).flatten(), batch * length)
    return out


def run_mlp(
    x: Tensor, weights: MlpWeights, config: ModelConfig, suffix: str, tap: Tap, expert: int | None = None
) -> Tensor:
    """A dense FFN, shared experts or one routed expert, [n, in] -> [n, out]; ``suffix`` as in ``ffn_up_exps``."""
    for name in ("gate", "up"):
        tap.rows(f"ffn_{name}{suffix}.weight", x, expert)
    inner = situ(linear(x, weights.gate), linear(x, weights.up), config.situ_beta, config.situ_linear_beta)
    tap.rows(f"ffn_down{suffix}.weight", inner, expert)
    return linear(inner, weights.down)
