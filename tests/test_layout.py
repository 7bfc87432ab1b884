"""Layout: every tensor of the checkpoint has its place, or a message says which has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from convert.config import ModelConfig
from convert.domain import SourceTensor
from convert.layout import Layout, build_layout
from convert.shapes import released_config, released_specs, text_sources, vision_sources
from quant.errors import InputError
from quant.tensors import TensorClass

_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E8M0": 1}
LAYER = "language_model.model.layers."


def small_config(k31: bool = True) -> ModelConfig:
    """Three layers (KDA dense, KDA experts, MLA experts) of the released kind with few experts."""
    config = released_config("k3.1-pro" if k31 else "k3")
    dsa = replace(config.dsa, layers=(2,)) if config.dsa else None
    return replace(
        config, n_layers=3, layer_kinds=("kda", "kda", "mla"), moe=replace(config.moe, experts=3, used=2), dsa=dsa
    )


def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> SourceTensor:
    return SourceTensor(name, dtype, shape, 0, 0, math.prod(shape) * _BYTES[dtype])


def tensors_of(config: ModelConfig) -> dict[str, SourceTensor]:
    found = {}
    for pattern in (*text_sources(config), *vision_sources()):
        for expert in range(pattern.count):
            name = pattern.name.format(e=expert)
            found[name] = tensor(name, pattern.dtype, pattern.shape)
    return found


def changed(found: Mapping[str, SourceTensor], name: str, **fields: object) -> dict[str, SourceTensor]:
    assert name in found
    return {**found, name: replace(found[name], **fields)}  # type: ignore[arg-type]


def layout_of(config: ModelConfig, found: Mapping[str, SourceTensor]) -> Layout:
    return build_layout(config, found)


def specs_by_name(layout: Layout) -> dict[str, object]:
    return {spec.name: spec for spec in layout.specs}


@pytest.mark.parametrize("k31", [False, True])
def test_every_released_tensor_has_its_place(k31: bool) -> None:
    config = small_config(k31)
    layout = layout_of(config, tensors_of(config))
    assert layout.specs == released_specs(config)
    assert {t.name.split(".")[0] for t in layout.left_out} == {"vision_tower", "mm_projector"}
    assert layout.warnings == ()


def test_layers_come_first_and_globals_last() -> None:
    config = small_config()
    names = [spec.name for spec in layout_of(config, tensors_of(config)).specs]
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blk.")]
    assert layers == sorted(layers)
    assert names[-4:] == ["token_embd.weight", "output.weight", "output_norm.weight", "output_res_score.weight"]


def test_the_text_prefix_is_optional() -> None:
    config = small_config()
    bare = {n.removeprefix("language_model."): t for n, t in tensors_of(config).items()}
    bare = {n: replace(t, name=n) for n, t in bare.items()}
    with_prefix, without = layout_of(config, tensors_of(config)), layout_of(config, bare)
    assert [(s.name, s.shape) for s in with_prefix.specs] == [(s.name, s.shape) for s in without.specs]


def test_g_proj_is_the_kda_gate_or_the_attention_gate_by_kind_of_layer() -> None:
    config = small_config()
    specs = layout_of(config, tensors_of(config)).specs
    gates = {s.name: s.sources[0] for s in specs if s.sources and s.sources[0].endswith("g_proj.weight")}
    assert gates == {
        "blk.0.ssm_g.weight": f"{LAYER}0.self_attn.g_proj.weight",
        "blk.1.ssm_g.weight": f"{LAYER}1.self_attn.g_proj.weight",
        "blk.2.attn_gate.weight": f"{LAYER}2.self_attn.g_proj.weight",
    }


def test_convolutions_of_two_or_three_axes_become_four() -> None:
    config = small_config()
    name = f"{LAYER}0.self_attn.q_conv1d.weight"
    found = changed(tensors_of(config), name, shape=(12288, 4))
    specs = {s.name: s for s in layout_of(config, found).specs}
    assert specs["blk.0.ssm_conv1d_q.weight"].shape == (1, 12288, 1, 4)
    assert specs["blk.0.ssm_conv1d_k.weight"].shape == (1, 12288, 1, 4)
    with pytest.raises(InputError, match=r"q_conv1d.* has shape \[12288, 4, 1\].*\[12288, 1, 4\] or \[12288, 4\]"):
        layout_of(config, changed(found, name, shape=(12288, 4, 1)))


def test_a_log_has_one_entry_per_head_or_padding_to_128() -> None:
    config = small_config()
    name = f"{LAYER}1.self_attn.A_log"
    for length in (96, 128):
        specs = {s.name: s for s in layout_of(config, changed(tensors_of(config), name, shape=(length,))).specs}
        assert specs["blk.1.ssm_a"].shape == (96,)
    with pytest.raises(InputError, match=r"A_log has shape \[112\]; the config asks for \[128\] or \[96\]"):
        layout_of(config, changed(tensors_of(config), name, shape=(112,)))


def test_a_missing_k_norm_bias_becomes_zeros_and_a_warning() -> None:
    config = small_config()
    found = tensors_of(config)
    del found[f"{LAYER}2.self_attn.indexer.k_norm.bias"]
    layout = layout_of(config, found)
    specs = {s.name: s for s in layout.specs}
    assert (specs["blk.2.indexer.k_norm.bias"].transform, specs["blk.2.indexer.k_norm.bias"].sources) == ("zeros", ())
    assert "k_norm.bias" in layout.warnings[0] and "zeros" in layout.warnings[0]


def test_other_missing_tensors_are_named() -> None:
    config = small_config()
    found = tensors_of(config)
    del found[f"{LAYER}2.self_attn.indexer.wk.weight"]
    with pytest.raises(InputError, match=r"lacks language_model\.model\.layers\.2\.self_attn\.indexer\.wk\.weight"):
        layout_of(config, found)


def test_a_missing_expert_is_named() -> None:
    config = small_config()
    found = {n: t for n, t in tensors_of(config).items() if ".layers.1.block_sparse_moe.experts.1.w2" not in n}
    with pytest.raises(InputError, match=r"layers\.1\.block_sparse_moe\.experts\.1\.w2\.weight"):
        layout_of(config, found)


def test_an_expert_beyond_the_count_is_unconsumed() -> None:
    config = small_config()
    name = f"{LAYER}1.block_sparse_moe.experts.3.w1.weight_packed"
    found = tensors_of(config) | {name: tensor(name, "U8", (3072, 1792))}
    with pytest.raises(InputError, match=r"experts\.3\.w1\.weight_packed has no place in kimi-k31"):
        layout_of(config, found)


def test_packed_without_scale_and_scale_without_packed_are_refused() -> None:
    config = small_config()
    stem = f"{LAYER}1.block_sparse_moe.experts.0.w1.weight"
    for leaf, other in (("packed", "scale"), ("scale", "packed")):
        found = tensors_of(config)
        del found[f"{stem}_{leaf}"]
        with pytest.raises(InputError, match=rf"w1\.weight_{other} has no .*w1\.weight_{leaf}"):
            layout_of(config, found)


def test_an_unknown_quantization_is_refused_by_its_suffix() -> None:
    config = small_config()
    name = f"{LAYER}0.mlp.gate_proj.weight_scale_inv"
    found = tensors_of(config) | {name: tensor(name, "F32", (264, 56))}
    with pytest.raises(InputError, match=r"1 tensors end in \.weight_scale_inv, an unknown quantization"):
        layout_of(config, found)


def test_packed_width_is_half_the_logical_width() -> None:
    config = small_config()
    name = f"{LAYER}1.block_sparse_moe.experts.2.w1.weight_packed"
    with pytest.raises(InputError, match=r"has shape \[3072, 3584\]; the config asks for \[3072, 1792\]"):
        layout_of(config, changed(tensors_of(config), name, shape=(3072, 3584)))


def test_scales_may_be_u8_or_e8m0() -> None:
    config = small_config()
    found = {n: replace(t, dtype="F8_E8M0") if n.endswith("weight_scale") else t for n, t in tensors_of(config).items()}
    assert layout_of(config, found).specs == released_specs(config)


def test_experts_may_be_bf16_but_not_mixed() -> None:
    config = small_config()
    found = {n: t for n, t in tensors_of(config).items() if ".experts." not in n}
    for layer in (1, 2):
        for expert in range(3):
            for leaf, shape in (("w1", (3072, 3584)), ("w2", (3584, 3072)), ("w3", (3072, 3584))):
                name = f"{LAYER}{layer}.block_sparse_moe.experts.{expert}.{leaf}.weight"
                found[name] = tensor(name, "BF16", shape)
    specs = {s.name: s for s in layout_of(config, found).specs}
    assert specs["blk.1.ffn_up_exps.weight"].source_type == "BF16"
    assert specs["blk.1.ffn_up_exps.weight"].transform == "experts"
    stem = f"{LAYER}1.block_sparse_moe.experts.1.w1.weight"
    del found[stem]
    found[f"{stem}_packed"] = tensor(f"{stem}_packed", "U8", (3072, 1792))
    found[f"{stem}_scale"] = tensor(f"{stem}_scale", "U8", (3072, 112))
    with pytest.raises(InputError, match=r"different kinds: BF16 \(first: expert 0\), MXFP4 \(first: expert 1\)"):
        layout_of(config, found)


def test_any_plain_linear_layer_may_be_packed() -> None:
    config = small_config()
    stem = f"{LAYER}1.block_sparse_moe.routed_expert_down_proj.weight"
    found = tensors_of(config)
    del found[stem]
    found[f"{stem}_packed"] = tensor(f"{stem}_packed", "U8", (3584, 3584))
    found[f"{stem}_scale"] = tensor(f"{stem}_scale", "U8", (3584, 224))
    specs = {s.name: s for s in layout_of(config, found).specs}
    down = specs["blk.1.ffn_routed_down.weight"]
    assert (down.transform, down.source_type, down.cls) == ("packed", "MXFP4", TensorClass.LATENT_PROJECTION)


def test_a_packed_kv_b_is_refused() -> None:
    config = small_config()
    stem = f"{LAYER}2.self_attn.kv_b_proj.weight"
    found = tensors_of(config)
    del found[stem]
    found[f"{stem}_packed"] = tensor(f"{stem}_packed", "U8", (24576, 256))
    found[f"{stem}_scale"] = tensor(f"{stem}_scale", "U8", (24576, 16))
    with pytest.raises(InputError, match=r"kv_b_proj\.weight_packed is MXFP4"):
        layout_of(config, found)


def test_shape_and_dtype_faults_show_both_sides() -> None:
    config = small_config()
    name = f"{LAYER}0.input_layernorm.weight"
    with pytest.raises(InputError, match=r"input_layernorm\.weight has shape \[7169\]; the config asks for \[7168\]"):
        layout_of(config, changed(tensors_of(config), name, shape=(7169,)))
    with pytest.raises(InputError, match=r"input_layernorm\.weight is F8_E8M0; expected BF16 or F32"):
        layout_of(config, changed(tensors_of(config), name, dtype="F8_E8M0"))


def test_multi_token_prediction_and_surplus_layers_are_left_out_with_a_warning() -> None:
    config = small_config()
    extra = ("language_model.model.mtp.0.weight", "mtp.norm.weight", f"{LAYER}3.input_layernorm.weight")
    found = tensors_of(config) | {name: tensor(name, "BF16", (10,)) for name in extra}
    layout = layout_of(config, found)
    assert {t.name for t in layout.left_out} >= set(extra)
    assert "3 tensors" in layout.warnings[0] and "60 bytes" in layout.warnings[0]


def test_a_tied_output_is_the_embedding() -> None:
    config = replace(small_config(), tie_embeddings=True)
    found = tensors_of(config)
    specs = {s.name: s for s in layout_of(config, found).specs}
    assert "language_model.lm_head.weight" not in found
    assert specs["output.weight"].sources == specs["token_embd.weight"].sources


def test_float32_indexer_tensors_are_taken_as_they_are() -> None:
    config = small_config()
    name = f"{LAYER}2.self_attn.indexer.weights_proj.weight"
    specs = {s.name: s for s in layout_of(config, changed(tensors_of(config), name, dtype="F32")).specs}
    assert specs["blk.2.indexer.proj.weight"].source_type == "F32"
