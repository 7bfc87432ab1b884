"""The fields of a checkpoint's configuration that decide a conversion, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arch = Literal["kimi-k3", "kimi-k31"]
LayerKind = Literal["kda", "mla"]


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi delta attention: the linear-attention layers.

    Attributes:
        heads, head_dim: the state of one head is ``head_dim`` x ``head_dim``.
        conv_kernel: taps of the causal depthwise convolution.
        gate_lower_bound: bound of the sigmoid decay gate, None for the softplus gate.
        full_rank_gate: the output gate is one [heads * head_dim, hidden] matrix.
    """

    heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    full_rank_gate: bool


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention: ranks of the two latents and the three head widths."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    output_gate: bool


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Latent mixture of experts.

    Attributes:
        experts, used, shared: routed experts, routed experts per token, shared experts.
        width: intermediate width of one expert.
        latent: width of the space that routed experts read and write.
        latent_norm: an RMSNorm follows the weighted sum of experts.
        renormalize, scaling, gating: how scores become weights.
        groups, groups_used: expert groups of the router, None when the config does not name them.
    """

    experts: int
    used: int
    shared: int
    width: int
    latent: int
    latent_norm: bool
    renormalize: bool
    scaling: float
    gating: Literal["sigmoid", "softmax"]
    groups: int | None
    groups_used: int | None


@dataclass(frozen=True, slots=True)
class DsaConfig:
    """Sparse attention of K3.1: indexer heads, their width, selected keys, and the 0-based layers that have one."""

    heads: int
    head_dim: int
    top_k: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a conversion needs to know of a model; every size in elements.

    Attributes:
        arch: GGUF architecture.
        layer_kinds: attention of each layer, by 0-based index.
        dense_layers: leading layers with a dense FFN of width ``ffn_dense``.
        situ_linear_beta: None when the up branch of SiTU is not bounded.
        attn_res_block: layers per block of attention residuals.
        dsa: None for K3.
        bos, eos, pad: token ids, None when the config names none.
        tie_embeddings: the output matrix is the embedding.
        warnings: what the reader should know of this config.
    """

    arch: Arch
    n_layers: int
    hidden: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    layer_kinds: tuple[LayerKind, ...]
    dense_layers: int
    ffn_dense: int
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    situ_beta: float
    situ_linear_beta: float | None
    attn_res_block: int
    dsa: DsaConfig | None
    bos: int | None
    eos: int | None
    pad: int | None
    tie_embeddings: bool
    warnings: tuple[str, ...] = ()
