"""Gated multi-head latent attention without positions, plain or absorbed, dense or restricted to selected keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from convert.config import MlaConfig
from kimi_gguf.reference.ops import linear, rms_norm


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """One MLA layer; H heads, d = hidden size.

    Attributes:
        q_a: [q_lora, d]; q_norm: [q_lora]; q_b: [H * (nope + rope), q_lora], head-major, nope rows first.
        kv_a: [kv_lora + rope, d], latent rows first; kv_norm: [kv_lora].
        k_b: [H, nope, kv_lora], the key half of ``kv_b``.
        v_b: [H, v, kv_lora], the value half.
        g: [H * v, d], output gate, or None; o: [d, H * v].
    """

    q_a: Tensor
    q_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_norm: Tensor
    k_b: Tensor
    v_b: Tensor
    g: Tensor | None
    o: Tensor


@dataclass(slots=True)
class MlaCache:
    """Per token: the normed latent [B, S, kv_lora], the shared key part [B, S, rope], and the indexer key."""

    latent: Tensor | None = None
    shared: Tensor | None = None
    index: Tensor | None = None


def append(old: Tensor | None, new: Tensor) -> Tensor:
    """``new`` after ``old`` along the token axis."""
    return new if old is None else torch.cat((old, new), dim=1)


def query_latent(x: Tensor, weights: MlaWeights, eps: float) -> Tensor:
    """The normed query latent [B, T, q_lora], read by ``q_b`` and by the indexer."""
    return rms_norm(linear(x, weights.q_a), weights.q_norm, eps)


def key_latent(x: Tensor, weights: MlaWeights, config: MlaConfig, eps: float) -> tuple[Tensor, Tensor]:
    """The normed latent [B, T, kv_lora] and the shared key part [B, T, rope], which no norm touches."""
    latent, shared = torch.split(linear(x, weights.kv_a), [config.kv_lora, config.rope], dim=-1)
    return rms_norm(latent, weights.kv_norm, eps), shared


def attention_logits(
    q: Tensor, latent: Tensor, shared: Tensor, weights: MlaWeights, config: MlaConfig, *, absorbed: bool
) -> Tensor:
    """Scaled logits [B, H, T, S] before any mask.

    Args:
        q: [B, T, H * (nope + rope)]; latent: [B, S, kv_lora]; shared: [B, S, rope].
        absorbed: move the key projection onto the query instead of expanding keys; equal up to rounding.
    """
    width = config.nope + config.rope
    q = torch.unflatten(q, -1, (config.heads, width)).transpose(1, 2)
    q_nope, q_rope = torch.split(q, [config.nope, config.rope], dim=-1)
    k_b = weights.k_b
    if absorbed:
        moved = (q_nope.to(k_b.dtype) @ k_b).float()
        near = moved @ latent.transpose(1, 2).unsqueeze(1)
    else:
        keys = linear(latent, k_b.flatten(0, 1))
        keys = torch.unflatten(keys, -1, (config.heads, config.nope)).transpose(1, 2)
        near = q_nope @ keys.transpose(-1, -2)
    far = q_rope @ shared.transpose(1, 2).unsqueeze(1)
    logits: Tensor = (near + far) * width**-0.5
    return logits


def attend(
    logits: Tensor, allowed: Tensor, latent: Tensor, weights: MlaWeights, config: MlaConfig, *, absorbed: bool
) -> Tensor:
    """Softmax over the allowed keys and the sum of values, [B, T, H * v].

    Args:
        logits: [B, H, T, S]; allowed: bool, broadcastable to [B, T, S]; latent: [B, S, kv_lora].
    """
    weight = _attention_weights(logits, allowed)
    v_b = weights.v_b
    if absorbed:
        summed = weight @ latent.unsqueeze(1)
        out = (summed.to(v_b.dtype) @ v_b.transpose(-1, -2)).float()
    else:
        values = linear(latent, v_b.flatten(0, 1))
        values = torch.unflatten(values, -1, (config.heads, config.v)).transpose(1, 2)
        out = weight @ values
    return out.transpose(1, 2).flatten(2)


def latent_sums(logits: Tensor, allowed: Tensor, latent: Tensor) -> Tensor:
    """What the absorbed form's ``v_b`` reads: each head's weighted sum of latents, [B, H, T, kv_lora].

    Arguments as ``attend``.
    """
    return _attention_weights(logits, allowed) @ latent.unsqueeze(1)


def _attention_weights(logits: Tensor, allowed: Tensor) -> Tensor:
    return torch.softmax(logits.masked_fill(~allowed.unsqueeze(-3), float("-inf")), dim=-1)


def gated_output(out: Tensor, x: Tensor, weights: MlaWeights) -> Tensor:
    """The output gate and the output projection."""
    return linear(gated_heads(out, x, weights), weights.o)


def gated_heads(out: Tensor, x: Tensor, weights: MlaWeights) -> Tensor:
    """The output gate, which reads the same normed hidden states x as ``q_a``; [B, T, H * v]."""
    return out if weights.g is None else out * torch.sigmoid(linear(x, weights.g))
