"""Kimi delta attention: a linear recurrence with one decay per channel, in two forms.

Per head, with state S [key, value], S = 0 at the start::

    S <- diag(exp(g_t)) S;   r = v_t - S^T k_t;   S <- S + beta_t k_t r^T;   o_t = S^T q_t

The chunked form solves the corrections r of 16 tokens at once. With G the running sum of g inside a chunk, tokens
i >= j meet through exp(G_i - G_j) <= 1, taken pairwise: exp(-G_j) alone overflows float32 for strong decays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from convert.config import KdaConfig
from kimi_gguf.reference.conv import short_conv
from kimi_gguf.reference.ops import l2_normalize, linear, rms_norm
from kimi_gguf.reference.options import KdaForm

CHUNK = 16
_PAIRS_AT_ONCE = 1 << 27


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """One KDA layer; H heads, D channels per head, P = H * D, d = hidden size.

    Attributes:
        q, k, v, g: [P, d]; g is the output gate.
        q_conv, k_conv, v_conv: [P, K].
        f_a, f_b: [D, d], [P, D], the low-rank decay projection.
        b: [H, d], the write strength.
        decay: [H], exp(A_log).
        dt_bias: [P], head-major.
        o_norm: [D].
        o: [d, P].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor
    f_a: Tensor
    f_b: Tensor
    b: Tensor
    decay: Tensor
    dt_bias: Tensor
    g: Tensor
    o_norm: Tensor
    o: Tensor


@dataclass(slots=True)
class KdaCache:
    """What a KDA layer remembers: three convolution tails [B, K - 1, P] and the state [B, H, D, D]."""

    q_tail: Tensor | None = None
    k_tail: Tensor | None = None
    v_tail: Tensor | None = None
    state: Tensor | None = None


def log_decay(a: Tensor, decay: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The log of the decay per channel, <= 0.

    ``lower_bound * sigmoid(decay (a + dt_bias))`` when the model has a lower bound, else the softplus form
    ``-decay softplus(a + dt_bias)``.

    Args:
        a: [..., H, D]; decay: [H]; dt_bias: [H, D].
    """
    shifted = a + dt_bias
    scale = decay.unsqueeze(-1)
    if lower_bound is None:
        return -scale * functional.softplus(shifted)
    return lower_bound * torch.sigmoid(scale * shifted)


def recurrence_sequential(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token.

    Args:
        q, k, v, g: [B, H, T, D]; q already scaled, g the log decay.
        beta: [B, H, T].
        state: [B, H, D, D] (key, value).

    Returns:
        Outputs [B, H, T, D] and the state after the last token.
    """
    outputs = []
    for t in range(q.shape[2]):
        state = state * torch.exp(g[:, :, t]).unsqueeze(-1)
        k_t = k[:, :, t]
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k_t)
        state = state + torch.einsum("bhk,bhv->bhkv", k_t * beta[:, :, t, None], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(outputs, dim=2), state


def recurrence_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, pairwise: bool = True
) -> tuple[Tensor, Tensor]:
    """The recurrence in chunks of 16 tokens; arguments and result as ``recurrence_sequential``.

    ``pairwise`` False splits exp(G_i - G_j) around the middle of the chunk's range, which is a plain product of
    matrices and faster, and is safe only while a chunk's log decay stays above -160 (16 tokens at -5 give -80).
    Long sequences go through in runs of chunks, so that the pairwise products stay below 2^27 floats.
    """
    batch, heads, length, width = q.shape
    run = max(1, _PAIRS_AT_ONCE // (batch * heads * CHUNK * CHUNK * width)) * CHUNK
    outputs = []
    for begin in range(0, length, run):
        at = slice(begin, begin + run)
        output, state = _run_of_chunks(
            q[:, :, at], k[:, :, at], v[:, :, at], g[:, :, at], beta[:, :, at], state, pairwise
        )
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def _run_of_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, pairwise: bool
) -> tuple[Tensor, Tensor]:
    length = q.shape[2]
    fill = -length % CHUNK
    # Padding tokens write nothing (beta 0) and do not decay (g 0), so the state passes through them.
    q, k, v, g = (functional.pad(x, (0, 0, 0, fill)) for x in (q, k, v, g))
    beta = functional.pad(beta, (0, fill))
    q, k, v, g = (torch.unflatten(x, 2, (-1, CHUNK)) for x in (q, k, v, g))
    beta = torch.unflatten(beta, 2, (-1, CHUNK)).unsqueeze(-1)
    total = g.cumsum(3)
    last = total[:, :, :, -1:]
    kk, qk = _pairwise_products(q, k, total) if pairwise else _centred_products(q, k, total, last)
    grown = torch.exp(total)
    system = torch.eye(CHUNK) + torch.tril(kk * beta, -1)
    right = torch.cat((v * beta, k * grown * beta), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    qk = torch.tril(qk)
    q_in = q * grown
    k_out = (k * torch.exp(last - total)).transpose(-1, -2)
    keep = torch.exp(last).transpose(-1, -2)
    outputs = []
    for chunk in range(q.shape[2]):
        update = writes[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append(q_in[:, :, chunk] @ state + qk[:, :, chunk] @ update)
        state = keep[:, :, chunk] * state + k_out[:, :, chunk] @ update
    return torch.cat(outputs, dim=2)[:, :, :length], state


def _pairwise_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """k.k and q.k of each pair (i, j), i >= j, of a chunk, decayed by exp(G_i - G_j): [B, H, N, 16, 16] each."""
    gap = total.unsqueeze(-2) - total.unsqueeze(-3)
    # Above the diagonal the gap is positive and may overflow; those pairs are masked by the caller.
    later = k.unsqueeze(-3) * torch.exp(gap.clamp(max=0.0))
    return (k.unsqueeze(-2) * later).sum(-1), (q.unsqueeze(-2) * later).sum(-1)


def _centred_products(q: Tensor, k: Tensor, total: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    middle = last / 2
    up = torch.exp(total - middle)
    down = (k * torch.exp(middle - total)).transpose(-1, -2)
    return (k * up) @ down, (q * up) @ down


def kda(
    x: Tensor,
    weights: KdaWeights,
    config: KdaConfig,
    *,
    norm_eps: float,
    l2_eps: float,
    form: KdaForm = "chunked",
    cache: KdaCache | None = None,
) -> Tensor:
    """One KDA layer on the normed hidden states x [B, T, d], float32 [B, T, d].

    Arguments as ``kda_heads``.
    """
    gated = kda_heads(x, weights, config, norm_eps=norm_eps, l2_eps=l2_eps, form=form, cache=cache)
    return linear(gated, weights.o)


def kda_heads(
    x: Tensor,
    weights: KdaWeights,
    config: KdaConfig,
    *,
    norm_eps: float,
    l2_eps: float,
    form: KdaForm = "chunked",
    cache: KdaCache | None = None,
) -> Tensor:
    """What the output projection of a KDA layer reads: the gated, normed heads, float32 [B, T, P].

    Args:
        norm_eps: of the output norm; l2_eps: of the normalisation of q and k.
        form: "chunked" and "centred" are ``recurrence_chunked`` with ``pairwise`` True and False.
        cache: continued and updated in place when given; otherwise the sequence starts here.
    """
    memory = cache if cache is not None else KdaCache()
    batch, length = x.shape[:2]

    def heads(y: Tensor) -> Tensor:
        return y.view(batch, length, config.heads, config.head_dim).transpose(1, 2)

    q, memory.q_tail = short_conv(linear(x, weights.q), weights.q_conv, memory.q_tail)
    k, memory.k_tail = short_conv(linear(x, weights.k), weights.k_conv, memory.k_tail)
    v, memory.v_tail = short_conv(linear(x, weights.v), weights.v_conv, memory.v_tail)
    q = l2_normalize(heads(q), l2_eps) * config.head_dim**-0.5
    k = l2_normalize(heads(k), l2_eps)
    a = linear(linear(x, weights.f_a), weights.f_b).view(batch, length, config.heads, config.head_dim)
    bias = weights.dt_bias.view(config.heads, config.head_dim)
    g = log_decay(a, weights.decay, bias, config.gate_lower_bound).transpose(1, 2)
    beta = torch.sigmoid(linear(x, weights.b)).transpose(1, 2)
    state = memory.state
    if state is None:
        state = x.new_zeros(batch, config.heads, config.head_dim, config.head_dim)
    if form == "sequential":
        out, memory.state = recurrence_sequential(q, k, heads(v), g, beta, state)
    else:
        out, memory.state = recurrence_chunked(q, k, heads(v), g, beta, state, pairwise=form == "chunked")
    normed = rms_norm(out, weights.o_norm, norm_eps).transpose(1, 2).flatten(2)
    return normed * torch.sigmoid(linear(x, weights.g))
