"""Sizes of a synthetic Kimi K3 / K3.1 checkpoint, and the config.json that states them in the released layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from convert.config import LayerKind
from quant.errors import UsageError

SPECIAL_SLOTS = 256
RELEASES = ("k3", "k3.1-pro")


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Every size of a checkpoint; the defaults suit K-quants (rows of whole 256-blocks) and stay below 20 MB.

    Attributes:
        k31: with the indexer tensors and ``dsa_config`` of K3.1.
        layer_kinds: None for the released pattern: every fourth layer and the last one MLA, the others KDA.
        vocab: ids in total; the last 256 are special slots, so at least 512.
        kda_heads, kda_head_dim, heads, nope, rope, v: KDA heads, and MLA heads with their three widths.
        experts, used, shared, expert_width, latent: latent MoE. Never 8 experts: llama.cpp treats 8 as Mixtral.
        index_heads, index_head_dim, index_topk: the indexer.
        vision: with a (tiny) vision tower and projector.
    """

    k31: bool = True
    layers: int = 5
    layer_kinds: tuple[LayerKind, ...] | None = None
    hidden: int = 256
    vocab: int = 768
    context: int = 4096
    kda_heads: int = 2
    kda_head_dim: int = 128
    conv_kernel: int = 4
    heads: int = 2
    q_lora: int = 256
    kv_lora: int = 256
    nope: int = 128
    rope: int = 64
    v: int = 128
    dense_layers: int = 1
    ffn_dense: int = 512
    experts: int = 16
    used: int = 4
    shared: int = 2
    expert_width: int = 256
    latent: int = 256
    attn_res_block: int = 2
    gate_lower_bound: float | None = -5.0
    index_heads: int = 8
    index_head_dim: int = 64
    index_topk: int = 16
    vision: bool = True
    vision_hidden: int = 32
    vision_width: int = 64
    vision_qkv: int = 48
    vision_layers: int = 2
    vision_grid: int = 8

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Attention of each layer.

        Raises:
            UsageError: ``layer_kinds`` names another number of layers.
        """
        if self.layer_kinds is None:
            return tuple("mla" if i % 4 == 3 or i == self.layers - 1 else "kda" for i in range(self.layers))
        if len(self.layer_kinds) != self.layers:
            raise UsageError(f"layer_kinds names {len(self.layer_kinds)} layers, the shape has {self.layers}")
        return self.layer_kinds

    @property
    def ranks(self) -> int:
        """Ordinary tokens: all ids but the special slots."""
        return self.vocab - SPECIAL_SLOTS


def released_shape(model: Literal["k3", "k3.1-pro"]) -> TinyShape:
    """The sizes of the released checkpoints."""
    k3 = TinyShape(
        k31=False,
        layers=93,
        hidden=7168,
        vocab=163840,
        context=1048576,
        kda_heads=96,
        heads=96,
        q_lora=1536,
        kv_lora=512,
        ffn_dense=33792,
        experts=896,
        used=16,
        expert_width=3072,
        latent=3584,
        attn_res_block=12,
        index_heads=32,
        index_head_dim=128,
        index_topk=2048,
        vision_hidden=1024,
        vision_width=4096,
        vision_qkv=1536,
        vision_layers=27,
        vision_grid=64,
    )
    return replace(k3, k31=model == "k3.1-pro")


def _text_config(shape: TinyShape) -> dict[str, Any]:
    kinds = shape.kinds
    mla_layers = [i + 1 for i, kind in enumerate(kinds) if kind == "mla"]
    linear: dict[str, Any] = {
        "full_attn_layers": mla_layers,
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "kda"],
        "num_heads": shape.kda_heads,
        "head_dim": shape.kda_head_dim,
        "short_conv_kernel_size": shape.conv_kernel,
        "use_full_rank_gate": True,
    }
    if shape.gate_lower_bound is not None:
        linear["gate_lower_bound"] = shape.gate_lower_bound
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "transformers_version": "4.56.2",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn_dense,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "q_lora_rank": shape.q_lora,
        "kv_lora_rank": shape.kv_lora,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.v,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-05,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": shape.attn_res_block,
        "num_nextn_predict_layers": 0,
        "num_experts": shape.experts,
        "num_experts_per_token": shape.used,
        "num_shared_experts": shape.shared,
        "moe_intermediate_size": shape.expert_width,
        "routed_expert_hidden_size": shape.latent,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "linear_attn_config": linear,
        **special_ids(shape),
    }
    if shape.k31:
        text["dsa_config"] = {
            "index_n_heads": shape.index_heads,
            "index_head_dim": shape.index_head_dim,
            "index_topk": shape.index_topk,
            "dsa_layers": mla_layers,
        }
    return text


def _quantization_config() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    parts = (
        "self_attn",
        "shared_experts",
        r"mlp\.(gate|up|gate_up|down)_proj",
        "lm_head",
        "vision_tower",
        "mm_projector",
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{part}.*" for part in parts],
    }


def _vision_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "patch_size": 14,
        "init_pos_emb_height": shape.vision_grid,
        "init_pos_emb_width": shape.vision_grid,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "vt_num_hidden_layers": shape.vision_layers,
        "vt_hidden_size": shape.vision_hidden,
        "vt_num_attention_heads": 12,
        "qkv_hidden_size": shape.vision_qkv,
        "vt_intermediate_size": shape.vision_width,
        "norm_type": "rmsnorm",
        "activation_func": "gelu_pytorch_tanh",
        "mlp_type": "mlp2",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": shape.vision_hidden,
        "text_hidden_size": shape.hidden,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "_attn_implementation": "flash_attention_2",
    }


def special_ids(shape: TinyShape) -> dict[str, int]:
    """The three token ids that config.json states: first, third and last special slot."""
    return {
        "bos_token_id": shape.ranks,
        "eos_token_id": shape.ranks + 2,
        "pad_token_id": shape.vocab - 1,
    }


def checkpoint_config(shape: TinyShape, *, quantized: bool = True) -> dict[str, Any]:
    """config.json of a checkpoint of ``shape``; ``quantized`` when its experts are MXFP4."""
    name = "KimiK31" if shape.k31 else "KimiK3"
    text = _text_config(shape)
    if quantized:
        text["quantization_config"] = _quantization_config()
    config: dict[str, Any] = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": "kimi_k31" if shape.k31 else "kimi_k3",
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": shape.ranks + 21,
        "tie_word_embeddings": False,
        **special_ids(shape),
        "text_config": text,
    }
    if shape.vision:
        config["vision_config"] = _vision_config(shape)
    return config
