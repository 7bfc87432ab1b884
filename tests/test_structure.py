"""The structural check: whole files pass, and each missing, extra or misshapen part is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_samples import Files, small

from convert.gguf_file import MetadataEntry, TensorEntry, ValueType, lay_out
from convert.metadata import build_metadata
from convert.shapes import released_config, released_specs
from convert.structure import Structure, check_structure
from quant.gguf_split import read_gguf_set
from quant.types import QuantType

RECIPE = SimpleNamespace(name="MXFP4", file_type=38)

Keys = list[MetadataEntry]
Tensors = list[TensorEntry]


def parts(shape: str = "k3.1-pro") -> tuple[Keys, Tensors]:
    config = small(released_config(shape))
    size = config.vocab_size
    vocab = SimpleNamespace(
        tokens=[f"t{n}" for n in range(size)], types=[1] * size, merges=[], bos=300, eos=302, pad=319, pre="kimi-k2"
    )
    specs = released_specs(config)
    keys = build_metadata(config, vocab, Files({"chat_template.jinja": b"x"}), RECIPE, specs=specs).entries
    types = {"MXFP4": QuantType.MXFP4, "BF16": QuantType.BF16, "F32": QuantType.F32}
    tensors = []
    for spec in specs:
        plain = len(spec.shape) == 1 or spec.name.endswith(("ffn_gate_inp.weight", "indexer.proj.weight"))
        tensors.append(TensorEntry(spec.name, spec.shape, QuantType.F32 if plain else types[spec.source_type]))
    return list(keys), tensors


def check(path: Path, keys: Keys, tensors: Tensors) -> Structure:
    layout = lay_out(keys, tensors)
    path.write_bytes(layout.header.ljust(layout.nbytes, b"\0"))
    result = check_structure(read_gguf_set(path))
    assert result is not None
    return result


@pytest.mark.parametrize("shape", ["k3", "k3.1-pro"])
def test_a_whole_file_passes_and_its_config_is_read_back(shape: str, tmp_path: Path) -> None:
    keys, tensors = parts(shape)
    result = check(tmp_path / "m.gguf", keys, tensors)
    assert (result.faults, result.warnings) == ((), ())
    config = small(released_config(shape))
    assert result.config == replace(
        config,
        bos=None,
        eos=None,
        pad=None,
        rms_norm_eps=result.config.rms_norm_eps,
        moe=replace(config.moe, groups=None),
    )


def drop(name: str) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys[:] = [k for k in keys if k.key.partition(".")[2] != name and k.key != name]
        tensors[:] = [t for t in tensors if t.name != name]

    return change


def put(key: str, type_: Any, value: Any, element: Any = None) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys[:] = [k for k in keys if k.key != key]
        keys.append(MetadataEntry(key, type_, value, element))

    return change


def swap(name: str, shape: tuple[int, ...], qtype: QuantType = QuantType.F32) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        tensors[:] = [TensorEntry(name, shape, qtype) if t.name == name else t for t in tensors]

    return change


def add(name: str) -> Callable[[Keys, Tensors], None]:
    return lambda keys, tensors: tensors.append(TensorEntry(name, (32,), QuantType.F32))


U32, F32, BOOL, ARRAY = ValueType.UINT32, ValueType.FLOAT32, ValueType.BOOL, ValueType.ARRAY
FAULTS = {
    "missing tensor": (drop("blk.3.indexer.k_norm.bias"), r"1 tensors are missing: blk\.3\.indexer\.k_norm\.bias"),
    "extra tensor": (add("blk.0.attn_extra.weight"), r"no place in kimi-k31: blk\.0\.attn_extra"),
    "shape": (swap("blk.1.ssm_a", (3,)), r"blk\.1\.ssm_a is \[3\], the keys make it \[2\]"),
    "norm type": (
        swap("output_norm.weight", (64,), QuantType.F16),
        r"1 tensors \(norm\) are F16, below F32: output_norm\.weight",
    ),
    "required key": (drop("kda.head_dim"), r"kda\.head_dim is missing"),
    "required float": (drop("activation.situ_beta"), r"situ_beta is missing"),
    "silent key": (drop("expert_weights_norm"), r"expert_weights_norm is missing: routing weights are not normalised"),
    "silent scale": (drop("expert_weights_scale"), r"expert_weights_scale is missing"),
    "key of another type": (put("kimi-k31.block_count", ValueType.STRING, "5"), r"block_count is STRING"),
    "key of another width": (put("kimi-k31.expert_count", ValueType.UINT64, 6), r"expert_count is UINT64"),
    "contradicting keys": (put("kimi-k31.attention.key_length", U32, 7), r"key_length is 7, the other keys make it 48"),
    "layer kinds": (put("kimi-k31.attention.head_count_kv", ARRAY, [0, 0, 0, 1], ValueType.INT32), "each of 5 layers"),
    "more layers than tensors": (put("kimi-k31.block_count", U32, 2**32 - 1), "cannot be 4294967295 layers"),
    "gating": (put("kimi-k31.expert_gating_func", U32, 4), "neither 1"),
    "tokens": (drop("tokenizer.ggml.tokens"), "tokens is missing"),
    "token count": (put("kimi-k31.vocab_size", U32, 321), r"320 tokens for 321 rows"),
    "token types": (put("tokenizer.ggml.token_type", ARRAY, [1] * 9, ValueType.INT32), "9 token types for 320 tokens"),
    "special id": (put("tokenizer.ggml.eos_token_id", U32, 320), "the eos token is 320"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named(case: str, tmp_path: Path) -> None:
    change, message = FAULTS[case]
    keys, tensors = parts()
    change(keys, tensors)
    faults = check(tmp_path / "m.gguf", keys, tensors).faults
    assert faults
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(faults))


WARNINGS = {
    "softplus gate": (drop("kda.gate_lower_bound"), "the decay gate becomes a softplus"),
    "unknown key": (put("kimi-k31.rope.freq_base", F32, 1e4), r"does not know: kimi-k31\.rope\.freq_base"),
    "router type": (
        swap("blk.1.ffn_gate_inp.weight", (6, 64), QuantType.Q4_0),
        r"\(router\) are Q4_0, below F32: blk\.1\.ffn",
    ),
    "no template": (drop("tokenizer.chat_template"), "no chat template"),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_what_still_loads_is_a_warning(case: str, tmp_path: Path) -> None:
    change, message = WARNINGS[case]
    keys, tensors = parts()
    change(keys, tensors)
    result = check(tmp_path / "m.gguf", keys, tensors)
    assert result.faults == ()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(result.warnings))


def test_other_spellings_that_llama_cpp_accepts_pass(tmp_path: Path) -> None:
    keys, tensors = parts()
    put("kimi-k31.attention.indexer.types", ARRAY, [1] * 5, U32)(keys, tensors)
    swap("blk.0.ssm_conv1d_q.weight", (64, 1, 4))(keys, tensors)
    for name in ("blk.3.attn_k_b.weight", "blk.3.attn_v_b.weight"):
        drop(name)(keys, tensors)
    tensors.append(TensorEntry("blk.3.attn_kv_b.weight", (128, 32), QuantType.BF16))
    assert check(tmp_path / "m.gguf", keys, tensors).faults == ()


def test_an_mla_layer_without_indexer_needs_no_indexer_tensors(tmp_path: Path) -> None:
    keys, tensors = parts()
    put("kimi-k31.attention.indexer.types", ARRAY, [False, False, False, True, False], BOOL)(keys, tensors)
    tensors[:] = [t for t in tensors if not t.name.startswith("blk.4.indexer")]
    assert check(tmp_path / "m.gguf", keys, tensors).faults == ()


def test_gaps_and_a_tail_are_faults(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    keys, tensors = parts("k3")
    layout = lay_out(keys, tensors)
    path.write_bytes(layout.header.ljust(layout.nbytes + 64, b"\0"))
    result = check_structure(read_gguf_set(path))
    assert result is not None and "its tensors end at" in result.faults[0]


def test_another_architecture_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(lay_out([MetadataEntry("general.architecture", ValueType.STRING, "llama")], []).header)
    assert check_structure(read_gguf_set(path)) is None
