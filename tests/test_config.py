"""config.json: what it means, where its fields may sit, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.config import DsaConfig, ModelConfig, parse_config
from convert.shapes import released_config
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config, released_shape
from quant.errors import InputError

DELETE = object()


def config(k31: bool = True, **changes: Any) -> dict[str, Any]:
    """A small config; ``changes`` go to text_config, with ``__`` for one level more."""
    whole = checkpoint_config(TinyShape(k31=k31))
    for key, value in changes.items():
        *path, last = key.split("__")
        place = whole["text_config"]
        for step in path:
            place = place[step]
        if value is DELETE:
            del place[last]
        else:
            place[last] = value
    return whole


def parse(value: Any) -> ModelConfig:
    return parse_config(json.dumps(value).encode())


def refused(value: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse(value)
    assert caught.value.message.startswith("config.json: ")
    return caught.value.message


@pytest.mark.parametrize("model", ["k3", "k3.1-pro"])
def test_the_released_layout_gives_the_released_model(model):
    assert parse(checkpoint_config(released_shape(model))) == released_config(model)


def test_text_fields_at_the_top_level_mean_the_same():
    nested = config()
    flat = {**nested.pop("text_config"), "architectures": nested["architectures"]}
    assert parse(flat) == parse(config())


def test_quantization_settings_may_sit_in_either_place_or_be_absent():
    nested = config()
    top = copy.deepcopy(nested)
    top["quantization_config"] = top["text_config"].pop("quantization_config")
    assert parse(nested) == parse(top) == parse(config(quantization_config=DELETE))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config__format", "pack-quantized"),
        ("quantization_config__config_groups__group_0__format", "nvfp4-pack-quantized"),
        ("quantization_config__config_groups__group_0__weights__group_size", 16),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", [4]),
    ],
)
def test_another_packed_format_is_refused(key: str, value: Any):
    assert "quantization_config" in refused(config(**{key: value}))


def test_layer_lists_count_from_one():
    assert parse(config()).layer_kinds == ("kda", "kda", "kda", "mla", "mla")


@pytest.mark.parametrize(
    ("full", "kda", "word"),
    [
        ([4, 5], [1, 2], "1 of 5 layers are in neither list; the first, counted from 1, is 3"),
        ([3, 4, 5], [1, 2, 3], "layer 3 (counted from 1) is in kda_layers and in full_attn_layers"),
        ([3, 4], [0, 1, 2], "kda_layers holds 0"),
        ([4, 6], [1, 2, 3], "full_attn_layers holds 6"),
        ([4, 4, 5], [1, 2, 3], "holds 4 twice"),
        ([4, 5.0], [1, 2, 3], "holds 5.0"),
        ([4, True], [1, 2, 3], "holds True"),
        ("45", [1, 2, 3], "expected a list"),
        (None, [1, 2, 3], "keys found"),
    ],
)
def test_layer_lists_must_be_disjoint_and_complete(full: Any, kda: Any, word: str):
    changes = {"linear_attn_config__full_attn_layers": full, "linear_attn_config__kda_layers": kda}
    assert word in refused(config(k31=False, **changes))


def test_k31_is_what_has_an_indexer():
    assert parse(config()).arch == "kimi-k31" and parse(config(k31=False)).arch == "kimi-k3"
    unnamed = config()
    del unnamed["architectures"]
    assert parse(unnamed).arch == "kimi-k31"
    assert parse({**config(k31=False), "architectures": ["KimiLinearForCausalLM"]}).arch == "kimi-k3"


def test_k3_by_name_with_an_indexer_is_k31_with_a_warning():
    named = {**config(), "architectures": ["KimiK3ForConditionalGeneration"]}
    assert parse(named).arch == "kimi-k31" and "taken as K3.1" in parse(named).warnings[0]
    assert parse(config()).warnings == ()


def test_k31_by_name_without_an_indexer_is_refused():
    assert "no dsa_config" in refused({**config(k31=False), "architectures": ["KimiK31ForConditionalGeneration"]})


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], "KimiK3ForConditionalGeneration", [3]])
def test_another_architecture_is_refused(names: Any):
    assert "architectures" in refused({**config(), "architectures": names})


@pytest.mark.parametrize(
    "dsa",
    [
        {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 16, "dsa_layers": [4, 5]},
        {"num_heads": 8, "head_dim": 64, "topk": 16, "layers": [5, 4]},
        {"Index_Num_Heads": 8, "indexHeadDim": 64, "top_k": 16, "full_attn_layers": [4, 5], "rope": False},
    ],
)
def test_the_indexer_settings_are_read_under_all_known_names(dsa: dict[str, Any]):
    assert parse(config(dsa_config=dsa)).dsa == DsaConfig(heads=8, head_dim=64, top_k=16, layers=(3, 4))


def test_indexer_settings_at_the_top_level_count_too():
    nested = config()
    nested["dsa_config"] = nested["text_config"].pop("dsa_config")
    assert parse(nested).dsa == parse(config()).dsa


def test_unknown_indexer_keys_are_listed():
    message = refused(config(dsa_config={"n": 8, "d": 64, "k": 16, "dsa_layers": [4, 5]}))
    assert "no key is known for heads" in message and "d, dsa_layers, k, n" in message


def test_indexer_keys_that_disagree_are_refused():
    assert "disagree" in refused(config(dsa_config__head_dim=32))


@pytest.mark.parametrize(("layers", "first"), [([4], 5), ([3, 4, 5], 3), ([3, 4], 3), ([], 4)])
def test_indexer_layers_must_be_the_full_attention_layers(layers: list[int], first: int):
    assert f"counted from 1, is {first}" in refused(config(dsa_config__dsa_layers=layers))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "5", [5], 1 << 31, 10**30, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "num_experts",
        "moe_intermediate_size",
        "q_lora_rank",
        "attn_res_block_size",
        "linear_attn_config__head_dim",
        "dsa_config__index_topk",
    ],
)
def test_a_size_is_a_plausible_whole_number(key: str, value: Any):
    text = json.dumps(config(**{key: value})).encode()
    with pytest.raises(InputError, match=r"config\.json"):
        parse_config(text)


def test_sizes_whose_product_is_no_tensor_are_refused():
    big = {"hidden_size": (1 << 31) - 1, "moe_intermediate_size": 1 << 30, "num_shared_experts": 1 << 20}
    assert "too large to be a tensor" in refused(config(**big))


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "rms_norm_eps",
        "moe_renormalize",
        "routed_scaling_factor",
        "moe_router_activation_func",
        "latent_moe_use_norm",
        "mla_use_output_gate",
        "activation_situ_beta",
        "hidden_act",
        "moe_layer_freq",
        "first_k_dense_replace",
        "linear_attn_config",
        "linear_attn_config__use_full_rank_gate",
    ],
)
def test_a_key_that_decides_the_mathematics_has_no_default(key: str):
    message = refused(config(**{key: DELETE}))
    assert key.split("__")[-1] in message and "missing" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("topk_method", "greedy"),
        ("moe_router_activation_func", "tanh"),
        ("moe_layer_freq", 2),
        ("mla_use_nope", False),
        ("linear_attn_config__use_full_rank_gate", False),
        ("linear_attn_config__gate_lower_bound", 5.0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 1e-46),
        ("activation_situ_linear_beta", 0),
        ("activation_situ_linear_beta", -25.0),
        ("num_experts_per_token", 17),
        ("num_expert_group", 3),
        ("topk_group", 2),
        ("first_k_dense_replace", 6),
        ("eos_token_id", 768),
        ("tie_word_embeddings", "no"),
        ("use_grouped_topk", 1),
    ],
)
def test_a_model_that_the_architecture_cannot_express_is_refused(key: str, value: Any):
    whole = config(**{key: value})
    whole.pop("tie_word_embeddings")
    whole.pop("eos_token_id")
    assert key.split("__")[-1] in refused(whole) or "groups" in refused(whole)


def test_absent_optional_fields_keep_their_own_meaning():
    whole = config(
        linear_attn_config__gate_lower_bound=DELETE,
        activation_situ_linear_beta=DELETE,
        num_expert_group=DELETE,
        topk_group=DELETE,
        pad_token_id=None,
    )
    del whole["pad_token_id"]
    model = parse(whole)
    assert model.kda.gate_lower_bound is None and model.situ_linear_beta is None
    assert (model.moe.groups, model.moe.groups_used, model.pad) == (None, None, None)


def test_the_first_of_several_end_tokens_is_the_one():
    whole = config(eos_token_id=[514, 513])
    del whole["eos_token_id"]
    assert parse(whole).eos == 514


def test_a_field_that_differs_between_both_places_is_refused():
    assert "hidden_size is 256 and, at the top level, 512" in refused({**config(), "hidden_size": 512})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b"\xff",
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"text_config":3}',
        b" " * 32_000_001,
    ],
)
def test_a_text_that_is_no_config_is_one_message(text: bytes):
    with pytest.raises(InputError, match=r"config\.json"):
        parse_config(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BASE = config()
PLACES = [("text_config", key) for key in BASE["text_config"]] + [
    ("text_config", section, key)
    for section in ("linear_attn_config", "dsa_config", "quantization_config")
    for key in BASE["text_config"][section]
]


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from([*PLACES, ("architectures",), ("text_config",)]), JSON), max_size=3))
def test_any_values_in_any_places_are_a_config_or_an_input_error(changes: list[tuple[tuple[str, ...], Any]]):
    whole = copy.deepcopy(BASE)
    for path, value in changes:
        place: Any = whole
        for step in path[:-1]:
            place = place.get(step) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[path[-1]] = value
    survives(json.dumps(whole).encode())


@settings(max_examples=200)
@given(st.binary(max_size=100))
def test_any_bytes_are_a_config_or_an_input_error(text: bytes):
    survives(text)


def survives(text: bytes) -> None:
    try:
        parse_config(text)
    except InputError as error:
        str(error).encode()
