"""Metadata keys of kimi-k3 and kimi-k31: names, types and values as llama.cpp's loader reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_samples import Files

from convert.config import ModelConfig
from convert.gguf_file import MetadataEntry, ValueType, header_bytes
from convert.metadata import (
    OWN_TEMPLATE,
    ImatrixFacts,
    ModelMetadata,
    architecture_keys,
    build_metadata,
    file_stem,
    size_label,
)
from convert.model_card import own_chat_template, read_chat_template, read_model_card
from convert.overrides import apply_overrides, parse_override
from convert.shapes import released_config, released_specs
from quant.errors import InputError, UsageError

U32, F32, BOOL, TEXT = ValueType.UINT32, ValueType.FLOAT32, ValueType.BOOL, ValueType.STRING
RECIPE = SimpleNamespace(name="MXFP4", file_type=38)
VOCAB = SimpleNamespace(
    tokens=["a", "b", "ab"], types=[1, 1, 3], merges=["a b"], bos=163584, eos=163586, pad=163839, pre="kimi-k2"
)


def build(config: ModelConfig, files: dict[str, bytes] | None = None, **options: Any) -> ModelMetadata:
    return build_metadata(config, VOCAB, Files(files or {}), RECIPE, specs=released_specs(config), **options)


def by_key(entries: Any) -> dict[str, tuple[Any, Any]]:
    return {e.key: (e.type, list(e.value) if e.type is ValueType.ARRAY else e.value) for e in entries}


K31 = {
    "kimi-k31.block_count": (U32, 93),
    "kimi-k31.context_length": (U32, 1048576),
    "kimi-k31.embedding_length": (U32, 7168),
    "kimi-k31.feed_forward_length": (U32, 33792),
    "kimi-k31.vocab_size": (U32, 163840),
    "kimi-k31.attention.head_count": (U32, 96),
    "kimi-k31.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "kimi-k31.attention.layer_norm_epsilon": (F32, 1e-5),
    "kimi-k31.attention.q_lora_rank": (U32, 1536),
    "kimi-k31.attention.kv_lora_rank": (U32, 512),
    "kimi-k31.attention.key_length": (U32, 576),
    "kimi-k31.attention.value_length": (U32, 512),
    "kimi-k31.attention.key_length_mla": (U32, 192),
    "kimi-k31.attention.value_length_mla": (U32, 128),
    "kimi-k31.attention.indexer.head_count": (U32, 32),
    "kimi-k31.attention.indexer.key_length": (U32, 128),
    "kimi-k31.attention.indexer.top_k": (U32, 2048),
    "kimi-k31.rope.dimension_count": (U32, 64),
    "kimi-k31.ssm.conv_kernel": (U32, 4),
    "kimi-k31.kda.head_dim": (U32, 128),
    "kimi-k31.kda.gate_lower_bound": (F32, -5.0),
    "kimi-k31.expert_count": (U32, 896),
    "kimi-k31.expert_used_count": (U32, 16),
    "kimi-k31.expert_group_used_count": (U32, 1),
    "kimi-k31.expert_gating_func": (U32, 2),
    "kimi-k31.expert_feed_forward_length": (U32, 3072),
    "kimi-k31.expert_shared_count": (U32, 2),
    "kimi-k31.expert_latent_length": (U32, 3584),
    "kimi-k31.expert_weights_scale": (F32, 1.0),
    "kimi-k31.expert_weights_norm": (BOOL, True),
    "kimi-k31.leading_dense_block_count": (U32, 1),
    "kimi-k31.activation.situ_beta": (F32, 4.0),
    "kimi-k31.activation.situ_linear_beta": (F32, 25.0),
    "kimi-k31.attn_res.block_size": (U32, 12),
}
MLA_LAYERS = {*range(3, 93, 4), 92}


def test_k31_keys_are_exactly_these() -> None:
    entries = architecture_keys(released_config("k3.1-pro"))
    found = by_key(entries)
    kinds = found.pop("kimi-k31.attention.head_count_kv")
    indexers = found.pop("kimi-k31.attention.indexer.types")
    assert found == K31
    assert kinds == (ValueType.ARRAY, [int(layer in MLA_LAYERS) for layer in range(93)])
    assert indexers == (ValueType.ARRAY, [layer in MLA_LAYERS for layer in range(93)])
    elements = {e.key.rpartition(".")[2]: e.element for e in entries if e.element is not None}
    assert elements == {"head_count_kv": ValueType.INT32, "types": BOOL}


def test_k3_keys_are_those_of_k31_without_the_indexer() -> None:
    def suffixes(shape: str) -> set[str]:
        return {e.key.partition(".")[2] for e in architecture_keys(released_config(shape))}

    assert suffixes("k3.1-pro") - suffixes("k3") == {
        "attention.indexer.head_count",
        "attention.indexer.key_length",
        "attention.indexer.top_k",
        "attention.indexer.types",
        "attention.layer_norm_epsilon",
    }
    assert suffixes("k3") < suffixes("k3.1-pro")


def test_keys_that_cannot_say_the_config_are_errors() -> None:
    config = released_config("k3")
    with pytest.raises(InputError, match="95 KDA heads and 96 MLA heads"):
        architecture_keys(replace(config, kda=replace(config.kda, heads=95)))
    with pytest.raises(InputError, match="situ_linear_beta"):
        architecture_keys(replace(config, situ_linear_beta=None))


def test_the_softplus_gate_has_no_lower_bound_key() -> None:
    config = released_config("k3")
    keys = by_key(architecture_keys(replace(config, kda=replace(config.kda, gate_lower_bound=None))))
    assert "kimi-k3.kda.gate_lower_bound" not in keys


def test_general_and_tokenizer_keys_of_a_bare_checkpoint() -> None:
    result = build(released_config("k3.1-pro"))
    found = {k: v for k, v in by_key(result.entries).items() if not k.startswith("kimi-k31.")}
    assert found == {
        "general.architecture": (TEXT, "kimi-k31"),
        "general.type": (TEXT, "model"),
        "general.name": (TEXT, "Kimi K3.1 Pro"),
        "general.basename": (TEXT, "Kimi-K3.1-Pro"),
        "general.size_label": (TEXT, "896x60B"),
        "general.quantization_version": (U32, 2),
        "general.file_type": (U32, 38),
        "general.sampling.temp": (ValueType.FLOAT32, 1.0),
        "general.sampling.top_p": (ValueType.FLOAT32, 0.95),
        "general.sampling.top_k": (ValueType.INT32, 0),
        "general.sampling.min_p": (ValueType.FLOAT32, 0.0),
        "tokenizer.ggml.model": (TEXT, "gpt2"),
        "tokenizer.ggml.pre": (TEXT, "kimi-k2"),
        "tokenizer.ggml.tokens": (ValueType.ARRAY, ["a", "b", "ab"]),
        "tokenizer.ggml.token_type": (ValueType.ARRAY, [1, 1, 3]),
        "tokenizer.ggml.merges": (ValueType.ARRAY, ["a b"]),
        "tokenizer.ggml.bos_token_id": (U32, 163584),
        "tokenizer.ggml.eos_token_id": (U32, 163586),
        "tokenizer.ggml.padding_token_id": (U32, 163839),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.chat_template": (TEXT, own_chat_template()),
    }
    assert result.warnings == (OWN_TEMPLATE,)
    header_bytes(result.entries, [], [])


def test_size_label_is_experts_times_shared_weights_and_one_expert() -> None:
    assert size_label(released_specs(released_config("k3"))) == "896x60B"


CARD = b"""---
license: other
license_name: modified-mit
license_link: LICENSE
base_model:
- moonshotai/Kimi-K3
tags: [moe, kimi, moe]
pipeline_tag: text-generation
language:
- en
- no
---
# Title
license: not this one
"""


def test_the_model_card_tells_license_origin_and_tags() -> None:
    result = build(released_config("k3.1-pro"), {"README.md": CARD, "chat_template.jinja": b"{{ x }}"})
    found = by_key(result.entries)
    assert found["general.license"] == (TEXT, "other")
    assert found["general.license.name"] == (TEXT, "modified-mit")
    assert found["general.license.link"] == (TEXT, "LICENSE")
    assert found["general.base_model.count"] == (U32, 1)
    assert found["general.base_model.0.name"] == (TEXT, "Kimi K3")
    assert found["general.base_model.0.organization"] == (TEXT, "moonshotai")
    assert found["general.base_model.0.repo_url"] == (TEXT, "https://huggingface.co/moonshotai/Kimi-K3")
    assert found["general.tags"] == (ValueType.ARRAY, ["moe", "kimi", "text-generation"])
    assert found["general.languages"] == (ValueType.ARRAY, ["en", "no"])
    assert found["tokenizer.chat_template"] == (TEXT, "{{ x }}")
    assert result.warnings == ()


@pytest.mark.parametrize(
    ("readme", "warning"),
    [
        (b"---\nlicense: [\n---\n", "not YAML"),
        (b"---\n- a\n---\n", "is a list"),
        (b"---\nlicense: mit\n", "without an end"),
        (b"---\n" + b"x: y\n" * 20_000 + b"---\n", "not read"),
        (b"---\nx: " + b"[" * 30_000 + b"\n---\n", "not YAML"),
        (b"---\nx: 2026-99-99\n---\n", "not YAML"),
    ],
)
def test_a_broken_card_is_a_warning_and_gives_nothing(readme: bytes, warning: str) -> None:
    card = read_model_card(Files({"README.md": readme}))
    assert len(card.warnings) == 1 and warning in card.warnings[0]
    assert card.license is None and not card.tags


def test_odd_values_of_a_card_are_ignored() -> None:
    card = read_model_card(Files({"README.md": b"---\nlicense: {a: 1}\ntags: 5\nlanguage: null\n---\n"}))
    assert (card.license, card.tags, card.languages) == (None, ("5",), ())
    assert read_model_card(Files({"README.md": b"no front matter"})).warnings == ()
    assert read_model_card(Files({"README.md": b"---\nmodel_name: " + b"1:" * 3000 + b"1\n---\n"})).name is None
    assert read_model_card(Files({"README.md": b'---\nmodel_name: "a\\ud800"\n---\n'})).name == "a?"


def test_names_come_from_the_flag_then_the_checkpoint_then_the_architecture() -> None:
    config = released_config("k3")
    saved = {"config.json": json.dumps({"_name_or_path": "someone/Kimi-K3-Finetune"}).encode()}
    found = by_key(build(config, saved).entries)
    assert found["general.name"] == (TEXT, "Kimi K3 Finetune")
    assert found["general.organization"] == (TEXT, "someone")
    assert build(config, saved, name="My Kimi").name == "My Kimi"
    path = {"config.json": json.dumps({"_name_or_path": "/data/models/k3"}).encode()}
    assert build(config, path).name == "Kimi K3"


def test_file_stems_are_safe_names() -> None:
    assert file_stem("Kimi K3.1 Pro") == "Kimi-K3.1-Pro"
    assert file_stem("moonshotai/Kimi-K3") == "Kimi-K3"
    assert file_stem("../..\x1b[31m\n") == "31m"
    assert file_stem(" / ") == "model"


def test_chat_templates_are_found_where_checkpoints_keep_them() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for files, expected in (
        ({}, None),
        ({"tokenizer_config.json": b'{"chat_template": "X"}'}, "X"),
        ({"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}, "D"),
        ({"tokenizer_config.json": b'{"chat_template": "X"}', "chat_template.jinja": b"J"}, "J"),
        ({"tokenizer_config.json": b"{}"}, None),
    ):
        assert read_chat_template(Files(files)) == expected
    with pytest.raises(InputError, match="tokenizer_config"):
        read_chat_template(Files({"tokenizer_config.json": b"[" * 100}))


def test_an_imatrix_leaves_four_keys_and_no_path() -> None:
    found = by_key(build(released_config("k3"), imatrix=ImatrixFacts("ab" * 32, "wiki.txt", 7, 90)).entries)
    assert {k: v for k, v in found.items() if k.startswith("quantize.")} == {
        "quantize.imatrix.file": (TEXT, "sha256:" + "ab" * 32),
        "quantize.imatrix.dataset": (TEXT, "wiki.txt"),
        "quantize.imatrix.entries_count": (U32, 7),
        "quantize.imatrix.chunks_count": (U32, 90),
    }


def test_overrides_keep_the_type_of_the_key_and_type_new_keys() -> None:
    entries = [MetadataEntry("a.x", ValueType.INT32, 1), MetadataEntry("a.f", F32, 1.0)]
    texts = ["a.x=int:-7", "a.f=float:2.5", "b.n=int:5", "b.m=int:-5", "b.b=bool:true", "b.s=str:k=v:w", "b.f=float:1"]
    assert by_key(apply_overrides(entries, [parse_override(t) for t in texts])) == {
        "a.x": (ValueType.INT32, -7),
        "a.f": (F32, 2.5),
        "b.n": (U32, 5),
        "b.m": (ValueType.INT32, -5),
        "b.b": (BOOL, True),
        "b.s": (TEXT, "k=v:w"),
        "b.f": (F32, 1.0),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "k=5",
        "k=int:x",
        "k=bool:yes",
        "k=uint:5",
        "=int:5",
        "k=float:",
        "k=int:",
        "k=float:nan",
        "k=float:-inf",
    ],
)
def test_malformed_overrides_show_the_spelling(text: str) -> None:
    with pytest.raises(UsageError, match="KEY=TYPE:VALUE"):
        parse_override(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.x=str:7", "the key is INT32, the value str"),
        ("a.x=int:3000000000", "a.x is not INT32: 3000000000"),
        ("b.x=int:" + "9" * 30, "b.x is not UINT32: 99999"),
        ("a\nb=int:1", "is no key"),
        ("k" * 70_000 + "=int:1", "is no key"),
        ("a..b=int:1", "is no key"),
        ("a.l=int:1", "the key is ARRAY"),
        ("general.alignment=int:64", "cannot be overridden"),
        ("general.architecture=str:llama", "cannot be overridden"),
        ("split.count=int:2", "cannot be overridden"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(text: str, message: str) -> None:
    entries = [MetadataEntry("a.x", ValueType.INT32, 1), MetadataEntry("a.l", ValueType.ARRAY, [1], U32)]
    with pytest.raises(UsageError, match=message):
        apply_overrides(entries, [parse_override(text)])
