"""The tensors of kimi-k3 and kimi-k31: checkpoint name and shape, GGUF name and shape, class and transform.

One line per GGUF tensor, in the order in which a file holds them. Shapes are row-major, written with the symbols of
``dimensions``; ``|`` separates alternatives that checkpoints use for the same values.
GGUF names and shapes: llama.cpp's kimi-k3 loader; the ``indexer.*`` names are those of its deepseek32 architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

from convert.config import ModelConfig
from quant.tensors import TensorClass as Cls

A_LOG_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class TableRow:
    """One GGUF tensor of one kind of layer.

    Attributes:
        trait: the layers that have it: those whose ``layer_traits`` hold this word.
        name: GGUF name, without ``blk.N.``.
        cls: tensor class.
        transform: a name of ``convert.transforms``.
        shape: GGUF shape in symbols.
        sources: checkpoint name without the layer's prefix, and its shapes in symbols.
        when_missing: ``zeros`` when an absent source means zeros, else the absence is an error.
    """

    trait: str
    name: str
    cls: Cls
    transform: str
    shape: str
    sources: tuple[tuple[str, str], ...]
    when_missing: str = "error"


def _row(trait: str, name: str, cls: Cls, shape: str, source: str, source_shape: str | None = None) -> TableRow:
    """A tensor whose values are those of one source."""
    return TableRow(trait, name, cls, "copy", shape, ((source, source_shape or shape),))


def _score(name: str, source: str, trait: str = "all") -> TableRow:
    """An attention-residual score: norm weight times projection, of which only the product matters."""
    sources = ((f"{source}_norm.weight", "d"), (f"{source}_proj.weight", "1 d|d"))
    return TableRow(trait, name, Cls.RESIDUAL_SCORE, "product", "d", sources)


def _experts(name: str, source: str, shape: str) -> TableRow:
    pattern = f"block_sparse_moe.experts.{{e}}.{source}.weight"
    return TableRow("moe", name, Cls.ROUTED_EXPERT, "experts", f"E {shape}", ((pattern, shape),))


LAYER_TABLE: tuple[TableRow, ...] = (
    _row("all", "attn_norm.weight", Cls.NORM, "d", "input_layernorm.weight"),
    _score("attn_res_score.weight", "self_attention_res"),
    _row("kda", "attn_q.weight", Cls.KDA_PROJECTION, "P d", "self_attn.q_proj.weight"),
    _row("kda", "attn_k.weight", Cls.KDA_PROJECTION, "P d", "self_attn.k_proj.weight"),
    _row("kda", "attn_v.weight", Cls.KDA_PROJECTION, "P d", "self_attn.v_proj.weight"),
    _row("kda", "ssm_conv1d_q.weight", Cls.KDA_CONV, "1 P 1 K", "self_attn.q_conv1d.weight", "P 1 K|P K"),
    _row("kda", "ssm_conv1d_k.weight", Cls.KDA_CONV, "1 P 1 K", "self_attn.k_conv1d.weight", "P 1 K|P K"),
    _row("kda", "ssm_conv1d_v.weight", Cls.KDA_CONV, "1 P 1 K", "self_attn.v_conv1d.weight", "P 1 K|P K"),
    _row("kda", "ssm_f_a.weight", Cls.KDA_LOW_RANK, "D d", "self_attn.f_a_proj.weight"),
    _row("kda", "ssm_f_b.weight", Cls.KDA_LOW_RANK, "P D", "self_attn.f_b_proj.weight"),
    _row("kda", "ssm_beta.weight", Cls.KDA_LOW_RANK, "H d", "self_attn.b_proj.weight"),
    TableRow("kda", "ssm_a", Cls.KDA_STATE, "decay", "H", (("self_attn.A_log", "A|H"),)),
    _row("kda", "ssm_dt.bias", Cls.KDA_STATE, "P", "self_attn.dt_bias"),
    _row("kda", "ssm_g.weight", Cls.ATTENTION_GATE, "P d", "self_attn.g_proj.weight"),
    _row("kda", "ssm_norm.weight", Cls.NORM, "D", "self_attn.o_norm.weight"),
    _row("kda", "attn_output.weight", Cls.ATTENTION_OUTPUT, "d P", "self_attn.o_proj.weight"),
    _row("mla", "attn_q_a.weight", Cls.MLA_PROJECTION, "ql d", "self_attn.q_a_proj.weight"),
    _row("mla", "attn_q_a_norm.weight", Cls.NORM, "ql", "self_attn.q_a_layernorm.weight"),
    _row("mla", "attn_q_b.weight", Cls.MLA_PROJECTION, "Hq ql", "self_attn.q_b_proj.weight"),
    _row("mla", "attn_kv_a_mqa.weight", Cls.MLA_PROJECTION, "ckv d", "self_attn.kv_a_proj_with_mqa.weight"),
    _row("mla", "attn_kv_a_norm.weight", Cls.NORM, "kvl", "self_attn.kv_a_layernorm.weight"),
    TableRow(
        "mla",
        "attn_k_b.weight",
        Cls.MLA_ABSORBED,
        "head_keys",
        "Hm kvl dn",
        (("self_attn.kv_b_proj.weight", "Hkv kvl"),),
    ),
    TableRow(
        "mla",
        "attn_v_b.weight",
        Cls.MLA_ABSORBED,
        "head_values",
        "Hm dv kvl",
        (("self_attn.kv_b_proj.weight", "Hkv kvl"),),
    ),
    _row("mla_gate", "attn_gate.weight", Cls.ATTENTION_GATE, "Hv d", "self_attn.g_proj.weight"),
    _row("mla", "attn_output.weight", Cls.ATTENTION_OUTPUT, "d Hv", "self_attn.o_proj.weight"),
    _row("dsa", "indexer.attn_q_b.weight", Cls.INDEXER, "Hid ql", "self_attn.indexer.wq_b.weight"),
    _row("dsa", "indexer.attn_k.weight", Cls.INDEXER, "di d", "self_attn.indexer.wk.weight"),
    _row("dsa", "indexer.k_norm.weight", Cls.NORM, "di", "self_attn.indexer.k_norm.weight"),
    TableRow(
        "dsa",
        "indexer.k_norm.bias",
        Cls.NORM,
        "copy",
        "di",
        (("self_attn.indexer.k_norm.bias", "di"),),
        when_missing="zeros",
    ),
    _row("dsa", "indexer.proj.weight", Cls.INDEXER_WEIGHTS, "Hi d", "self_attn.indexer.weights_proj.weight"),
    _row("all", "ffn_norm.weight", Cls.NORM, "d", "post_attention_layernorm.weight"),
    _score("ffn_res_score.weight", "mlp_res"),
    _row("dense", "ffn_gate.weight", Cls.DENSE_FFN, "fd d", "mlp.gate_proj.weight"),
    _row("dense", "ffn_up.weight", Cls.DENSE_FFN, "fd d", "mlp.up_proj.weight"),
    _row("dense", "ffn_down.weight", Cls.DENSE_FFN, "d fd", "mlp.down_proj.weight"),
    _row("moe", "ffn_gate_inp.weight", Cls.ROUTER, "E d", "block_sparse_moe.gate.weight"),
    _row("moe", "exp_probs_b.bias", Cls.ROUTER_BIAS, "E", "block_sparse_moe.gate.e_score_correction_bias"),
    _row(
        "moe", "ffn_routed_down.weight", Cls.LATENT_PROJECTION, "z d", "block_sparse_moe.routed_expert_down_proj.weight"
    ),
    _row("moe_norm", "ffn_routed_norm.weight", Cls.NORM, "z", "block_sparse_moe.routed_expert_norm.weight"),
    _row("moe", "ffn_routed_up.weight", Cls.LATENT_PROJECTION, "d z", "block_sparse_moe.routed_expert_up_proj.weight"),
    _row(
        "shared", "ffn_gate_shexp.weight", Cls.SHARED_EXPERT, "fs d", "block_sparse_moe.shared_experts.gate_proj.weight"
    ),
    _row("shared", "ffn_up_shexp.weight", Cls.SHARED_EXPERT, "fs d", "block_sparse_moe.shared_experts.up_proj.weight"),
    _row(
        "shared", "ffn_down_shexp.weight", Cls.SHARED_EXPERT, "d fs", "block_sparse_moe.shared_experts.down_proj.weight"
    ),
    _experts("ffn_gate_exps.weight", "w1", "f z"),
    _experts("ffn_up_exps.weight", "w3", "f z"),
    _experts("ffn_down_exps.weight", "w2", "z f"),
)

_EMBEDDING = "model.embed_tokens.weight"

GLOBAL_TABLE: tuple[TableRow, ...] = (
    _row("all", "token_embd.weight", Cls.EMBEDDING, "V d", _EMBEDDING),
    _row("untied", "output.weight", Cls.OUTPUT, "V d", "lm_head.weight"),
    _row("tied", "output.weight", Cls.OUTPUT, "V d", _EMBEDDING),
    _row("all", "output_norm.weight", Cls.NORM, "d", "model.norm.weight"),
    _score("output_res_score.weight", "model.output_attn_res"),
)


def dimensions(config: ModelConfig) -> dict[str, int]:
    """The value of every symbol that a shape of the tables uses."""
    kda, mla, moe, dsa = config.kda, config.mla, config.moe, config.dsa
    sizes = {
        "d": config.hidden,
        "V": config.vocab_size,
        "fd": config.ffn_dense,
        "H": kda.heads,
        "D": kda.head_dim,
        "P": kda.heads * kda.head_dim,
        "K": kda.conv_kernel,
        "A": -(-kda.heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,
        "ql": mla.q_lora,
        "kvl": mla.kv_lora,
        "ckv": mla.kv_lora + mla.rope,
        "dn": mla.nope,
        "dv": mla.v,
        "Hm": mla.heads,
        "Hq": mla.heads * (mla.nope + mla.rope),
        "Hkv": mla.heads * (mla.nope + mla.v),
        "Hv": mla.heads * mla.v,
        "E": moe.experts,
        "z": moe.latent,
        "f": moe.width,
        "fs": moe.width * moe.shared,
    }
    if dsa is not None:
        sizes |= {"Hi": dsa.heads, "di": dsa.head_dim, "Hid": dsa.heads * dsa.head_dim}
    return sizes


def layer_traits(config: ModelConfig, layer: int) -> frozenset[str]:
    """Words that select the rows of ``LAYER_TABLE`` that ``layer`` has."""
    traits = {"all", config.layer_kinds[layer]}
    if config.layer_kinds[layer] == "mla" and config.mla.output_gate:
        traits.add("mla_gate")
    if config.dsa is not None and layer in config.dsa.layers:
        traits.add("dsa")
    if layer < config.dense_layers:
        traits.add("dense")
    else:
        traits.add("moe")
        if config.moe.shared:
            traits.add("shared")
        if config.moe.latent_norm:
            traits.add("moe_norm")
    return frozenset(traits)


def shapes(symbols: str, sizes: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """The alternatives of a shape in symbols, as numbers."""
    return tuple(
        tuple(int(word) if word.isdigit() else sizes[word] for word in alternative.split())
        for alternative in symbols.split("|")
    )
