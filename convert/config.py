"""Reads a checkpoint's ``config.json`` into one checked ``ModelConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal, cast

from convert.bounded_json import load_object
from convert.config_fields import Fields
from convert.model_config import Arch, DsaConfig, KdaConfig, LayerKind, MlaConfig, ModelConfig, MoeConfig

__all__ = ["Arch", "DsaConfig", "KdaConfig", "LayerKind", "MlaConfig", "ModelConfig", "MoeConfig", "parse_config"]

_ARCHITECTURES: dict[str, Arch] = {
    "KimiK3ForConditionalGeneration": "kimi-k3",
    "KimiK3ForCausalLM": "kimi-k3",
    "KimiK31ForConditionalGeneration": "kimi-k31",
    "KimiK31ForCausalLM": "kimi-k31",
}
# What the text model calls itself, with or without an indexer.
_TEXT_ARCHITECTURE = "KimiLinearForCausalLM"
_MAX_LAYERS = 100_000
_MAX_EXPERTS = 1_000_000
_INT64_MAX = (1 << 63) - 1

# Nobody outside Moonshot has seen the key names of dsa_config: these are DeepSeek's and Moonshot's habits,
# compared without case and underscores.
_DSA_ALIASES = {
    "heads": ("index_n_heads", "index_num_heads", "indexer_num_heads", "num_index_heads", "num_heads", "n_heads"),
    "head_dim": ("index_head_dim", "indexer_head_dim", "head_dim", "head_size", "key_length"),
    "top_k": ("index_topk", "indexer_topk", "topk", "topk_tokens", "index_topk_tokens"),
    "layers": ("dsa_layers", "index_layers", "indexer_layers", "layers", "full_attn_layers"),
}


def parse_config(text: bytes, file: str = "config.json") -> ModelConfig:
    """The model that ``config.json`` describes.

    Fields of the text model may sit in ``text_config`` or at the top level. Sizes have no defaults: a key whose
    absence would silently change the mathematics is an error, unless its absence has a meaning of its own
    (``gate_lower_bound``, ``activation_situ_linear_beta``, token ids, expert groups).

    Args:
        text: content of the file.
        file: its name, for messages.

    Raises:
        InputError: not JSON, a key missing, of the wrong kind or absurd, or a model that no GGUF architecture fits.
    """
    top = load_object(text, file)
    inner = top.get("text_config")
    if inner is None:
        fields = Fields(file, "", top)
    else:
        fields = Fields(file, "text_config", Fields(file, "", top).section("text_config").members, top)
    arch, warnings = _architecture(Fields(file, "", top), fields)
    _check_fixed_choices(fields)
    _check_quantization(fields)
    n_layers = fields.size("num_hidden_layers", high=_MAX_LAYERS)
    linear = fields.section("linear_attn_config")
    kinds = _layer_kinds(linear, n_layers)
    vocab_size = fields.size("vocab_size")
    config = ModelConfig(
        arch=arch,
        n_layers=n_layers,
        hidden=fields.size("hidden_size"),
        vocab_size=vocab_size,
        context_length=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.real("rms_norm_eps"),
        layer_kinds=kinds,
        dense_layers=fields.size("first_k_dense_replace", low=0, high=n_layers),
        ffn_dense=fields.size("intermediate_size"),
        kda=_kda(linear),
        mla=_mla(fields),
        moe=_moe(fields),
        situ_beta=fields.real("activation_situ_beta"),
        situ_linear_beta=fields.optional_real("activation_situ_linear_beta", positive=True),
        attn_res_block=fields.size("attn_res_block_size"),
        dsa=_dsa(fields.section("dsa_config"), kinds) if arch == "kimi-k31" else None,
        bos=_token_id(fields, "bos_token_id", vocab_size),
        eos=_token_id(fields, "eos_token_id", vocab_size),
        pad=_token_id(fields, "pad_token_id", vocab_size),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        warnings=warnings,
    )
    _check_products(fields, config)
    return config


def _architecture(top: Fields, fields: Fields) -> tuple[Arch, tuple[str, ...]]:
    """The architecture by ``architectures`` and ``dsa_config``; the latter wins over K3's name."""
    named = top.members.get("architectures")
    names = [] if named is None else named
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        top.fail(f"architectures is {named!r:.80}, expected a list of names")
    known = [name for name in names if name in _ARCHITECTURES]
    if names and not known and _TEXT_ARCHITECTURE not in names:
        top.fail(f"architectures names {', '.join(names)!r:.200}", f"readable are {', '.join(_ARCHITECTURES)}")
    has_indexer = fields.find("dsa_config")[1] is not None
    if not known:
        return ("kimi-k31" if has_indexer else "kimi-k3"), ()
    arch = _ARCHITECTURES[known[0]]
    if arch == "kimi-k31" and not has_indexer:
        top.fail(f"architectures names {known[0]}, but there is no dsa_config", "K3.1 needs its indexer's settings")
    if arch == "kimi-k3" and has_indexer:
        return "kimi-k31", (f"{top.file}: architectures names {known[0]}, but dsa_config is there: taken as K3.1",)
    return arch, ()


def _check_fixed_choices(fields: Fields) -> None:
    """What the GGUF architectures take for granted."""
    fields.choice("hidden_act", ("situ",))
    fields.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    if fields.size("moe_layer_freq") != 1:
        fields.fail(f"moe_layer_freq is {fields.find('moe_layer_freq')[1]}, only 1 can be converted")
    if not fields.flag("mla_use_nope"):
        fields.fail("mla_use_nope is false: rotary positions in MLA layers cannot be converted")


def _check_quantization(fields: Fields) -> None:
    """Other packed 4-bit formats have the same dtypes and shapes, and would be misread."""
    value = fields.find("quantization_config")[1]
    if value is None:
        return
    hint = "only compressed-tensors' mxfp4-pack-quantized is read; remove quantization_config if no weight is packed"
    quantization = fields.section("quantization_config")
    groups = quantization.members.get("config_groups")
    described: list[Any] = list(groups.values()) if isinstance(groups, dict) else []
    formats = {str(m.get("format")) for m in (quantization.members, *described) if isinstance(m, Mapping)} - {"None"}
    if formats and formats != {"mxfp4-pack-quantized"}:
        quantization.fail(f"format is {', '.join(sorted(formats))!r:.200}", hint)
    method = quantization.members.get("quant_method")
    if method not in (None, "compressed-tensors") and not formats:
        quantization.fail(f"quant_method is {method!r:.80}", hint)
    for group in described:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        size = weights.get("group_size") if isinstance(weights, Mapping) else None
        if size not in (None, 32):
            quantization.fail(f"group_size is {size!r:.80}, expected 32", hint)


def _layer_kinds(linear: Fields, n_layers: int) -> tuple[LayerKind, ...]:
    """Attention of each layer from the two 1-based lists, which must name each layer once."""
    if linear.members.get("kda_layers") is None or linear.members.get("full_attn_layers") is None:
        linear.fail(
            f"kda_layers or full_attn_layers is missing; keys found: {', '.join(sorted(linear.members))!r:.400}"
        )
    full = linear.numbers("full_attn_layers", 1, n_layers)
    kda = linear.numbers("kda_layers", 1, n_layers)
    both = sorted(set(full) & set(kda))
    if both:
        linear.fail(f"layer {both[0]} (counted from 1) is in kda_layers and in full_attn_layers")
    missing = sorted(set(range(1, n_layers + 1)) - set(full) - set(kda))
    if missing:
        linear.fail(
            f"{len(missing)} of {n_layers} layers are in neither list; the first, counted from 1, is {missing[0]}"
        )
    mla = frozenset(full)
    return tuple("mla" if layer in mla else "kda" for layer in range(1, n_layers + 1))


def _kda(linear: Fields) -> KdaConfig:
    bound = linear.optional_real("gate_lower_bound")
    if bound is not None and bound >= 0:
        linear.fail(f"gate_lower_bound is {bound}, expected a number below 0: states would grow")
    if not linear.flag("use_full_rank_gate"):
        linear.fail("use_full_rank_gate is false: low-rank output gates cannot be converted")
    return KdaConfig(
        heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_kernel=linear.size("short_conv_kernel_size", high=1024),
        gate_lower_bound=bound,
        full_rank_gate=True,
    )


def _mla(fields: Fields) -> MlaConfig:
    return MlaConfig(
        heads=fields.size("num_attention_heads"),
        q_lora=fields.size("q_lora_rank"),
        kv_lora=fields.size("kv_lora_rank"),
        nope=fields.size("qk_nope_head_dim"),
        rope=fields.size("qk_rope_head_dim"),
        v=fields.size("v_head_dim"),
        output_gate=fields.flag("mla_use_output_gate"),
    )


def _moe(fields: Fields) -> MoeConfig:
    experts = fields.size("num_experts", "n_routed_experts", high=_MAX_EXPERTS)
    grouped = fields.flag("use_grouped_topk", default=True)
    groups = fields.optional_size("num_expert_group", "n_group", low=1, high=experts) if grouped else None
    used_groups = fields.optional_size("topk_group", low=1, high=groups or 1) if grouped else None
    if groups and experts % groups:
        fields.fail(f"{experts} experts do not divide into {groups} groups")
    gating = fields.choice("moe_router_activation_func", ("sigmoid", "softmax"))
    return MoeConfig(
        experts=experts,
        used=fields.size("num_experts_per_token", "num_experts_per_tok", high=experts),
        shared=fields.size("num_shared_experts", low=0),
        width=fields.size("moe_intermediate_size"),
        latent=fields.size("routed_expert_hidden_size"),
        latent_norm=fields.flag("latent_moe_use_norm"),
        renormalize=fields.flag("moe_renormalize"),
        scaling=fields.real("routed_scaling_factor"),
        gating=cast(Literal["sigmoid", "softmax"], gating),
        groups=groups,
        groups_used=used_groups,
    )


def _dsa(dsa: Fields, kinds: tuple[LayerKind, ...]) -> DsaConfig:
    plain = {key.lower().replace("_", "").replace("-", ""): key for key in dsa.members}

    def key_of(field: str) -> str:
        found = [plain[alias.replace("_", "")] for alias in _DSA_ALIASES[field] if alias.replace("_", "") in plain]
        values = [dsa.members[key] for key in found]
        if not found or any(value != values[0] for value in values):
            fault = "no key is known for" if not found else f"the keys {', '.join(found)} disagree on"
            dsa.fail(
                f"{fault} {field}; keys found: {', '.join(sorted(dsa.members))!r:.400}",
                f"known keys: {', '.join(_DSA_ALIASES[field])}",
            )
        return found[0]

    layers = tuple(sorted(layer - 1 for layer in dsa.numbers(key_of("layers"), 1, len(kinds))))
    full = tuple(i for i, kind in enumerate(kinds) if kind == "mla")
    if layers != full:
        odd = sorted(set(layers) ^ set(full))
        dsa.fail(
            f"{key_of('layers')} differs from full_attn_layers in {len(odd)} layers; the first, counted from 1, "
            f"is {odd[0] + 1}",
            "each full-attention layer has an indexer, and no other; layers are counted from 1",
        )
    return DsaConfig(
        heads=dsa.size(key_of("heads")),
        head_dim=dsa.size(key_of("head_dim")),
        top_k=dsa.size(key_of("top_k")),
        layers=layers,
    )


def _token_id(fields: Fields, name: str, vocab_size: int) -> int | None:
    """A token id; of a list, the first one."""
    value = fields.find(name)[1]
    if isinstance(value, list) and value:
        return Fields(fields.file, fields.where, {name: value[0]}).size(name, low=0, high=vocab_size - 1)
    return fields.optional_size(name, high=vocab_size - 1)


def _check_products(fields: Fields, config: ModelConfig) -> None:
    """Element counts must stay below 2^63, so that later arithmetic on sizes means what it says."""
    kda, mla, moe = config.kda, config.mla, config.moe
    counts = {
        "vocab_size x hidden_size": (config.vocab_size, config.hidden),
        "KDA heads x head_dim x hidden_size": (kda.heads, kda.head_dim, config.hidden),
        "heads x head widths x ranks": (mla.heads, mla.nope + mla.rope + mla.v, mla.q_lora + mla.kv_lora),
        "heads x v_head_dim x hidden_size": (mla.heads, mla.v, config.hidden),
        "experts x width x latent": (moe.experts, moe.width, moe.latent),
        "shared experts x width x hidden_size": (moe.shared, moe.width, config.hidden),
    }
    for name, factors in counts.items():
        if 8 * prod(factors) > _INT64_MAX:
            fields.fail(f"{name} = {' x '.join(map(str, factors))} is too large to be a tensor")
