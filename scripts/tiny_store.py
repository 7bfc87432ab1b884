"""The tiny model's sizes, start values and trainable weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convert.config import ModelConfig, parse_config
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config
from kimi_gguf.reference.situ import MlpWeights
from kimi_gguf.reference.weights import OUTPUT, ROOT, CheckpointNamedStore

SHAPE = TinyShape(
    k31=True,
    layers=5,
    layer_kinds=("kda", "kda", "kda", "mla", "mla"),
    hidden=256,
    vocab=1280,
    context=512,
    kda_heads=4,
    kda_head_dim=64,
    heads=4,
    q_lora=256,
    kv_lora=128,
    nope=64,
    rope=32,
    v=64,
    ffn_dense=512,
    experts=16,
    used=4,
    shared=1,
    expert_width=256,
    latent=256,
    attn_res_block=2,
    gate_lower_bound=-5.0,
    index_heads=8,
    index_head_dim=32,
    index_topk=64,
    vision=False,
)
CONFIG = parse_config(json.dumps(checkpoint_config(SHAPE)).encode())


def mxfp4_round(weight: Tensor) -> Tensor:
    """``weight`` [..., n] rounded to MXFP4 (scale 2^ceil(log2(max / 6)) per 32, ties to the even code)."""
    blocks = weight.unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 6)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.ldexp(torch.round(scaled / step) * step, exponent).flatten(-2)


class StraightThrough(torch.autograd.Function):
    """MXFP4 in the forward pass (as BF16, which holds it exactly), identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return mxfp4_round(weight).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.float()


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Checkpoint name, shape and dtype of every trained tensor but the routed experts."""
    d, kda, latent, experts, dsa = config.hidden, config.kda, config.mla, config.moe, config.dsa
    assert dsa is not None
    p = kda.heads * kda.head_dim
    yield f"{ROOT}embed_tokens.weight", (config.vocab_size, d), "BF16"
    yield OUTPUT, (config.vocab_size, d), "BF16"
    yield f"{ROOT}norm.weight", (d,), "BF16"
    yield f"{ROOT}output_attn_res_norm.weight", (d,), "BF16"
    yield f"{ROOT}output_attn_res_proj.weight", (1, d), "BF16"
    for i, kind in enumerate(config.layer_kinds):
        base = f"{ROOT}layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{base}{name}.weight", (d,), "BF16"
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{base}{name}.weight", (1, d), "BF16"
        attn = f"{base}self_attn."
        if kind == "kda":
            for name in ("q", "k", "v"):
                yield f"{attn}{name}_proj.weight", (p, d), "BF16"
                yield f"{attn}{name}_conv1d.weight", (p, 1, kda.conv_kernel), "F32"
            yield f"{attn}f_a_proj.weight", (kda.head_dim, d), "BF16"
            yield f"{attn}f_b_proj.weight", (p, kda.head_dim), "BF16"
            yield f"{attn}b_proj.weight", (kda.heads, d), "BF16"
            yield f"{attn}A_log", (-(-kda.heads // 128) * 128,), "F32"
            yield f"{attn}dt_bias", (p,), "F32"
            yield f"{attn}g_proj.weight", (p, d), "BF16"
            yield f"{attn}o_norm.weight", (kda.head_dim,), "F32"
            yield f"{attn}o_proj.weight", (d, p), "BF16"
        else:
            yield f"{attn}q_a_proj.weight", (latent.q_lora, d), "BF16"
            yield f"{attn}q_a_layernorm.weight", (latent.q_lora,), "BF16"
            yield f"{attn}q_b_proj.weight", (latent.heads * (latent.nope + latent.rope), latent.q_lora), "BF16"
            yield f"{attn}kv_a_proj_with_mqa.weight", (latent.kv_lora + latent.rope, d), "BF16"
            yield f"{attn}kv_a_layernorm.weight", (latent.kv_lora,), "BF16"
            yield f"{attn}kv_b_proj.weight", (latent.heads * (latent.nope + latent.v), latent.kv_lora), "BF16"
            yield f"{attn}g_proj.weight", (latent.heads * latent.v, d), "BF16"
            yield f"{attn}o_proj.weight", (d, latent.heads * latent.v), "BF16"
            yield f"{attn}indexer.wq_b.weight", (dsa.heads * dsa.head_dim, latent.q_lora), "BF16"
            yield f"{attn}indexer.wk.weight", (dsa.head_dim, d), "BF16"
            yield f"{attn}indexer.weights_proj.weight", (dsa.heads, d), "BF16"
            yield f"{attn}indexer.k_norm.weight", (dsa.head_dim,), "BF16"
            yield f"{attn}indexer.k_norm.bias", (dsa.head_dim,), "BF16"
        if i < config.dense_layers:
            yield f"{base}mlp.gate_proj.weight", (config.ffn_dense, d), "BF16"
            yield f"{base}mlp.up_proj.weight", (config.ffn_dense, d), "BF16"
            yield f"{base}mlp.down_proj.weight", (d, config.ffn_dense), "BF16"
            continue
        ffn = f"{base}block_sparse_moe."
        shared = experts.shared * experts.width
        yield f"{ffn}gate.weight", (experts.experts, d), "BF16"
        yield f"{ffn}gate.e_score_correction_bias", (experts.experts,), "F32"
        yield f"{ffn}routed_expert_down_proj.weight", (experts.latent, d), "BF16"
        yield f"{ffn}routed_expert_up_proj.weight", (d, experts.latent), "BF16"
        yield f"{ffn}routed_expert_norm.weight", (experts.latent,), "BF16"
        yield f"{ffn}shared_experts.gate_proj.weight", (shared, d), "BF16"
        yield f"{ffn}shared_experts.up_proj.weight", (shared, d), "BF16"
        yield f"{ffn}shared_experts.down_proj.weight", (d, shared), "BF16"


def initial(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Start values: fan-in scaled normals, decays spread over about 1 to 2500 tokens, unit norms, even mixing."""
    if name.endswith("A_log"):
        value = torch.zeros(shape)
        heads = config.kda.heads
        value[:heads] = torch.rand(heads, generator=generator) * 0.6 - 0.3
        return value
    if name.endswith("dt_bias"):
        low, high = math.log(0.0004), math.log(1.0)
        rate = torch.exp(low + (high - low) * torch.rand(shape, generator=generator))
        return torch.logit(rate / 5.0)
    if name.endswith("bias") or "res_proj" in name:
        return torch.zeros(shape)
    if name.endswith("conv1d.weight"):
        value = torch.randn(shape, generator=generator) * 0.1
        value[..., -1] += 1.0
        return value
    if len(shape) == 1:
        return torch.full(shape, 0.5 if "routed_expert_norm" in name else 1.0)
    if "embed_tokens" in name:
        return torch.randn(shape, generator=generator) * 0.5
    scale = 0.5 if "lm_head" in name else 1.0
    if name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight")) and shape[0] == config.hidden:
        scale = 0.5
    if "b_proj" in name and "indexer" not in name and shape[0] == config.kda.heads:
        scale = 0.3
    return torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5


class TrainStore(nn.Module, CheckpointNamedStore):
    """A weight store over trainable tensors; matrices are handed out in BF16, experts in MXFP4."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        nn.Module.__init__(self)
        CheckpointNamedStore.__init__(self, config)
        generator = torch.Generator().manual_seed(seed)
        self.dtypes: dict[str, str] = {}
        self.values = nn.ParameterDict()
        for name, shape, dtype in shapes(config):
            self.dtypes[name] = dtype
            trainable = not name.endswith("e_score_correction_bias")
            self.values[key(name)] = nn.Parameter(initial(name, shape, config, generator), requires_grad=trainable)
        sizes = config.moe
        for i in range(config.dense_layers, config.n_layers):
            for part, out, inner in (
                ("w1", sizes.width, sizes.latent),
                ("w3", sizes.width, sizes.latent),
                ("w2", sizes.latent, sizes.width),
            ):
                value = torch.randn(sizes.experts, out, inner, generator=generator) * inner**-0.5
                self.values[f"experts|{i}|{part}"] = nn.Parameter(value)
        self.rounded: dict[tuple[int, str], Tensor] = {}

    def refresh(self) -> None:
        """Rounds all experts anew; once per optimizer step."""
        for name, value in self.values.items():
            if name.startswith("experts|"):
                _, layer, part = name.split("|")
                self.rounded[int(layer), part] = StraightThrough.apply(value)

    def tensor(self, name: str) -> Tensor:
        value: Tensor = self.values[key(name)]
        return value.bfloat16() if self.dtypes[name] == "BF16" else value

    def has(self, name: str) -> bool:
        return name in self.dtypes

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.values[key(name)]).bfloat16()

    def expert(self, layer: int, expert: int) -> MlpWeights:
        w1, w3, w2 = (self.rounded[layer, part][expert] for part in ("w1", "w3", "w2"))
        return MlpWeights(w1, w3, w2)


def key(name: str) -> str:
    """A checkpoint name in a form that module dictionaries accept."""
    return name.replace(".", "|")
