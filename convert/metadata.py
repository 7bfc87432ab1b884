"""All keys of a kimi-k3 or kimi-k31 GGUF: general, architecture, tokenizer.

Keys and types are those that llama.cpp's loader of these architectures reads; keys whose absence silently changes the
mathematics (decay gate, routing weights, LayerNorm epsilon) are always written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf

from convert.config import ModelConfig
from convert.domain import Source, TensorSpec
from convert.gguf_file import MetadataEntry, ValueType
from convert.model_card import ModelCard, own_chat_template, read_chat_template, read_model_card, title
from convert.overrides import Override, apply_overrides
from quant.errors import InputError
from quant.tensors import TensorClass

if TYPE_CHECKING:
    from convert.vocab import Vocab
    from quant.recipes import RecipeInfo

QUANTIZATION_VERSION = 2
DEFAULT_NAMES = {"kimi-k3": "Kimi K3", "kimi-k31": "Kimi K3.1 Pro"}
OWN_TEMPLATE = "the checkpoint has no chat template; the GGUF gets this tool's own for the format of Kimi K3 and K3.1"
# What the makers of the models recommend; top-k and min-p, which llama.cpp applies by itself, are off.
SAMPLING = (("temp", 1.0), ("top_p", 0.95), ("top_k", 0), ("min_p", 0.0))

_LONGEST_STEM_BYTES = 120
_VARIANT = "this variant of the architecture has no GGUF yet"
_GATING = {"softmax": 1, "sigmoid": 2}


@dataclass(frozen=True, slots=True)
class ImatrixFacts:
    """What a GGUF tells of the importance matrix it was made with; the file's path stays out of it."""

    sha256: str
    dataset: str
    entries: int
    chunks: int


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Keys in file order, the model's name, and what could not be known."""

    entries: tuple[MetadataEntry, ...]
    name: str
    warnings: tuple[str, ...]


def build_metadata(
    config: ModelConfig,
    vocab: Vocab,
    source: Source,
    recipe: RecipeInfo,
    *,
    specs: Sequence[TensorSpec],
    name: str | None = None,
    overrides: Sequence[Override] = (),
    imatrix: ImatrixFacts | None = None,
) -> ModelMetadata:
    """Every key of the output.

    Args:
        config: the model's sizes.
        vocab: tokens, types, merges and special ids.
        source: the checkpoint; README.md, config.json, tokenizer_config.json and chat_template.jinja are read.
        recipe: names the file type.
        specs: all output tensors, for the size label.
        name: overrides the checkpoint's own name.
        overrides: of ``--override-kv``, applied last.
        imatrix: adds the ``quantize.imatrix.*`` keys.

    Raises:
        InputError: the architecture's keys cannot express this config.
        UsageError: an override that does not fit its key.
    """
    card = read_model_card(source)
    chosen = name or (title(card.name) if card.name else DEFAULT_NAMES[config.arch])
    template = read_chat_template(source)
    entries = [
        *_general(config, card, chosen, recipe, size_label(specs)),
        *_sampling(),
        *architecture_keys(config),
        *_tokenizer(vocab, template or own_chat_template()),
        *(_imatrix(imatrix) if imatrix else ()),
    ]
    warnings = card.warnings if template else (*card.warnings, OWN_TEMPLATE)
    return ModelMetadata(tuple(apply_overrides(entries, overrides)), chosen, warnings)


def size_label(specs: Sequence[TensorSpec]) -> str:
    """Experts times the weights that one expert and all shared tensors hold, as llama.cpp labels: ``896x60B``."""
    shared = expert = 0
    stacks = []
    for spec in specs:
        if spec.cls is TensorClass.ROUTED_EXPERT:
            stacks.append(spec.shape[0])
            expert += math.prod(spec.shape[1:])
        else:
            shared += math.prod(spec.shape)
    count = sum(stacks) // len(stacks) if stacks else 0
    total = shared + expert * count
    return str(gguf.size_label(total, shared, expert, count))


def file_stem(name: str) -> str:
    """``name`` as a part of file names: ``Kimi K3.1 Pro`` becomes ``Kimi-K3.1-Pro``."""
    plain = name.strip().rpartition("/")[2]
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in plain)
    stem = "-".join(part for part in kept.split("-") if part).lstrip(".-")
    return stem.encode()[:_LONGEST_STEM_BYTES].decode(errors="ignore") or "model"


def architecture_keys(config: ModelConfig) -> list[MetadataEntry]:
    """The keys below ``kimi-k3.`` or ``kimi-k31.``.

    Raises:
        InputError: head counts of the two attentions differ, or SiTU has no linear bound: no key can say so.
    """
    kda, mla, moe = config.kda, config.mla, config.moe
    if kda.heads != mla.heads:
        raise InputError(
            f"config.json: {kda.heads} KDA heads and {mla.heads} MLA heads; {config.arch} has one count", _VARIANT
        )
    if config.situ_linear_beta is None:
        raise InputError("config.json: activation_situ_linear_beta is absent; llama.cpp's SiTU needs it", _VARIANT)
    entries = [
        _u32("block_count", config.n_layers),
        _u32("context_length", config.context_length),
        _u32("embedding_length", config.hidden),
        _u32("feed_forward_length", config.ffn_dense),
        _u32("vocab_size", config.vocab_size),
        _u32("attention.head_count", mla.heads),
        # The only marker of a layer's kind: MLA is served with one key head, KDA has none.
        _array("attention.head_count_kv", ValueType.INT32, [int(kind == "mla") for kind in config.layer_kinds]),
        _f32("attention.layer_norm_rms_epsilon", config.rms_norm_eps),
        _u32("attention.q_lora_rank", mla.q_lora),
        _u32("attention.kv_lora_rank", mla.kv_lora),
        _u32("attention.key_length", mla.kv_lora + mla.rope),
        _u32("attention.value_length", mla.kv_lora),
        _u32("attention.key_length_mla", mla.nope + mla.rope),
        _u32("attention.value_length_mla", mla.v),
        _u32("rope.dimension_count", mla.rope),
        *_indexer_keys(config),
        _u32("ssm.conv_kernel", kda.conv_kernel),
        _u32("kda.head_dim", kda.head_dim),
        *([] if kda.gate_lower_bound is None else [_f32("kda.gate_lower_bound", kda.gate_lower_bound)]),
        _u32("expert_count", moe.experts),
        _u32("expert_used_count", moe.used),
        *([] if moe.groups is None or moe.groups < 2 else [_u32("expert_group_count", moe.groups)]),
        *([] if moe.groups_used is None else [_u32("expert_group_used_count", moe.groups_used)]),
        _u32("expert_gating_func", _GATING[moe.gating]),
        _u32("expert_feed_forward_length", moe.width),
        _u32("expert_shared_count", moe.shared),
        _u32("expert_latent_length", moe.latent),
        _f32("expert_weights_scale", moe.scaling),
        _entry("expert_weights_norm", ValueType.BOOL, moe.renormalize),
        _u32("leading_dense_block_count", config.dense_layers),
        _f32("activation.situ_beta", config.situ_beta),
        _f32("activation.situ_linear_beta", config.situ_linear_beta),
        _u32("attn_res.block_size", config.attn_res_block),
    ]
    return [MetadataEntry(f"{config.arch}.{e.key}", e.type, e.value, e.element) for e in entries]


def _indexer_keys(config: ModelConfig) -> list[MetadataEntry]:
    if config.dsa is None:
        return []
    layers = frozenset(config.dsa.layers)
    return [
        _u32("attention.indexer.head_count", config.dsa.heads),
        _u32("attention.indexer.key_length", config.dsa.head_dim),
        _u32("attention.indexer.top_k", config.dsa.top_k),
        _array("attention.indexer.types", ValueType.BOOL, [i in layers for i in range(config.n_layers)]),
        # The loader's default is 1e-5 whatever the RMS epsilon is.
        _f32("attention.layer_norm_epsilon", config.rms_norm_eps),
    ]


def _general(config: ModelConfig, card: ModelCard, name: str, recipe: RecipeInfo, label: str) -> list[MetadataEntry]:
    entries = [
        _text("general.architecture", config.arch),
        _text("general.type", "model"),
        _text("general.name", name),
        _text("general.organization", card.organization),
        _text("general.basename", file_stem(name)),
        _text("general.size_label", label),
        _text("general.license", card.license),
        _text("general.license.name", card.license_name),
        _text("general.license.link", card.license_link),
        *_base_models(card),
        _texts("general.tags", card.tags),
        _texts("general.languages", card.languages),
        _u32("general.quantization_version", QUANTIZATION_VERSION),
        _u32("general.file_type", recipe.file_type),
    ]
    return [entry for entry in entries if entry is not None]


def _sampling() -> list[MetadataEntry]:
    """What llama.cpp's programs sample with when a request says nothing."""
    return [
        _entry(f"general.sampling.{key}", ValueType.INT32 if isinstance(value, int) else ValueType.FLOAT32, value)
        for key, value in SAMPLING
    ]


def _base_models(card: ModelCard) -> list[MetadataEntry | None]:
    if not card.base_models:
        return []
    entries: list[MetadataEntry | None] = [_u32("general.base_model.count", len(card.base_models))]
    for index, model in enumerate(card.base_models):
        prefix = f"general.base_model.{index}"
        entries.append(_text(f"{prefix}.name", model.name))
        entries.append(_text(f"{prefix}.organization", model.organization))
        entries.append(_text(f"{prefix}.repo_url", model.url))
    return entries


def _tokenizer(vocab: Vocab, template: str) -> list[MetadataEntry]:
    prefix = "tokenizer.ggml"
    ids = (("bos", vocab.bos), ("eos", vocab.eos), ("padding", vocab.pad))
    entries = [
        _text(f"{prefix}.model", "gpt2"),
        _text(f"{prefix}.pre", vocab.pre),
        _array(f"{prefix}.tokens", ValueType.STRING, vocab.tokens),
        _array(f"{prefix}.token_type", ValueType.INT32, vocab.types),
        _array(f"{prefix}.merges", ValueType.STRING, vocab.merges),
        *(None if number is None else _u32(f"{prefix}.{kind}_token_id", number) for kind, number in ids),
        _entry(f"{prefix}.add_bos_token", ValueType.BOOL, False),
        _text("tokenizer.chat_template", template),
    ]
    return [entry for entry in entries if entry is not None]


def _imatrix(facts: ImatrixFacts) -> list[MetadataEntry]:
    prefix = "quantize.imatrix"
    return [
        _entry(f"{prefix}.file", ValueType.STRING, f"sha256:{facts.sha256}"),
        _entry(f"{prefix}.dataset", ValueType.STRING, facts.dataset),
        _u32(f"{prefix}.entries_count", facts.entries),
        _u32(f"{prefix}.chunks_count", facts.chunks),
    ]


def _entry(key: str, type_: Any, value: Any) -> MetadataEntry:
    return MetadataEntry(key, type_, value)


def _u32(key: str, value: int) -> MetadataEntry:
    return MetadataEntry(key, ValueType.UINT32, value)


def _f32(key: str, value: float) -> MetadataEntry:
    return MetadataEntry(key, ValueType.FLOAT32, value)


def _array(key: str, element: Any, values: Sequence[Any]) -> MetadataEntry:
    return MetadataEntry(key, ValueType.ARRAY, values, element)


def _text(key: str, value: str | None) -> MetadataEntry | None:
    return None if value is None else MetadataEntry(key, ValueType.STRING, value)


def _texts(key: str, values: Sequence[str]) -> MetadataEntry | None:
    return _array(key, ValueType.STRING, values) if values else None
