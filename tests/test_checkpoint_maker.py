"""The maker of checkpoints: the release to the byte, and small ones of any size and sharding."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import safetensors
import tiktoken
import torch

from kimi_gguf.reference.checkpoint_files import tiktoken_model, tiktoken_ranks
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint, released_shape
from kimi_gguf.reference.checkpoint_tensors import TensorOptions, checkpoint_tensors
from kimi_gguf.reference.checkpoint_writer import bf16_bits, shard_header, split_by_layer, write_checkpoint
from quant.errors import UsageError
from quant.mxfp4 import decode
from quant.tensors import Mxfp4Rows

SMALL = TinyShape(layers=4, hidden=64, experts=4, latent=64, expert_width=32, ffn_dense=64, q_lora=32, kv_lora=32)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, by the safetensors library."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_k3_has_the_size_of_the_release_to_the_byte():
    count = payload = 0
    headers = []
    stem = re.compile(r"language_model\.model\.layers\.\d+|language_model|\w+")
    for _, group in groupby(checkpoint_tensors(released_shape("k3")), key=lambda t: stem.match(t.name)[0]):
        (shard,) = split_by_layer(group)
        headers.append(len(shard_header(shard)))
        count += len(shard)
        payload += sum(t.nbytes for t in shard)
    assert (count, len(headers), payload) == (497_220, 96, 1_560_860_324_864)
    assert headers[1] == 818_696 + 8
    assert payload + sum(headers) == 1_560_936_091_448


@pytest.mark.slow
def test_the_sparse_release_has_true_sizes_and_takes_no_room(sparse_release: Path):
    files = sorted(sparse_release.glob("*.safetensors"))
    assert [f.name for f in files[:2]] == ["model-00001-of-000096.safetensors", "model-00002-of-000096.safetensors"]
    assert len(files) == 96 and files[1].stat().st_size == 16_990_911_504
    assert sum(f.stat().st_blocks * 512 for f in files) < 200_000_000
    index = json.loads((sparse_release / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 1_561_217_377_280 and len(index["weight_map"]) == 497_340


def test_the_default_checkpoint_is_k31_in_the_released_layout(tmp_path: Path):
    directory = make_checkpoint(tmp_path / "tiny")
    assert len(list(directory.glob("model-*.safetensors"))) == 5 + 3
    tensors = read_all(directory)
    layer = "language_model.model.layers."
    dtypes = {torch.float32: "A_log dt_bias o_norm.weight q_conv1d.weight", torch.bfloat16: "f_a_proj.weight"}
    for dtype, names in dtypes.items():
        assert all(tensors[f"{layer}0.self_attn.{name}"].dtype == dtype for name in names.split())
    assert tensors[f"{layer}1.block_sparse_moe.experts.15.w2.weight_packed"].dtype == torch.uint8
    assert tensors[f"{layer}1.block_sparse_moe.gate.e_score_correction_bias"].abs().min() > 0
    assert tensors[f"{layer}0.self_attn.A_log"].shape == (128,)
    assert not tensors[f"{layer}0.self_attn.A_log"][2:].any()
    assert [i for i in range(5) if f"{layer}{i}.self_attn.indexer.wk.weight" in tensors] == [3, 4]
    config = json.loads((directory / "config.json").read_text())
    assert config["text_config"]["dsa_config"]["dsa_layers"] == [4, 5]


def test_each_layer_has_its_own_shard_and_globals_projector_and_tower_theirs(tmp_path: Path):
    directory = make_checkpoint(tmp_path / "tiny", SMALL)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for name, shard in index.items():
        parts = name.split(".")
        tail = {"mm_projector": 6, "vision_tower": 7}.get(parts[0], 5)
        number = int(parts[3]) + 1 if "layers" in parts else tail
        assert shard == f"model-{number:05d}-of-000007.safetensors"


@pytest.mark.parametrize("sharding", ["shuffled", 50_000])
def test_values_depend_on_seed_and_name_alone(tmp_path: Path, sharding):
    usual = read_all(make_checkpoint(tmp_path / "a", SMALL, seed=1))
    assert equal(usual, read_all(make_checkpoint(tmp_path / "b", SMALL, seed=1, sharding=sharding)))
    other = read_all(make_checkpoint(tmp_path / "c", SMALL, seed=2))
    norms = "language_model.model.norm.weight"
    assert not torch.equal(usual[norms], other[norms])


def test_shards_cut_by_bytes_stay_below_the_cut_and_split_pairs(tmp_path: Path):
    directory = make_checkpoint(tmp_path / "cut", SMALL, sharding=2150)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    with safetensors.safe_open(directory / index["language_model.model.norm.weight"], "pt") as file:
        assert sum(file.get_tensor(n).nbytes for n in file.keys()) <= 2150  # noqa: SIM118
    packed = [n for n in index if n.endswith("weight_packed")]
    assert any(index[n] != index[n.replace("_packed", "_scale")] for n in packed)


def test_bf16_experts_are_exactly_what_the_packed_ones_decode_to(tmp_path: Path):
    packed = read_all(make_checkpoint(tmp_path / "packed", SMALL))
    plain = read_all(make_checkpoint(tmp_path / "plain", SMALL, experts="bf16"))
    stems = [name.removesuffix("_packed") for name in packed if name.endswith("weight_packed")]
    assert len(stems) == 3 * 4 * 3
    for stem in stems:
        rows = Mxfp4Rows(packed[f"{stem}_packed"].numpy(), packed[f"{stem}_scale"].numpy())
        assert np.array_equal(plain[stem].float().numpy(), decode(rows))
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]


def test_expert_weights_have_the_spread_of_a_trained_matrix_and_use_all_codes():
    tensors = {t.name: t for t in checkpoint_tensors(TinyShape(vision=False, expert_width=512))}
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
    rows = Mxfp4Rows(tensors[f"{stem}_packed"].make(), tensors[f"{stem}_scale"].make())
    values = decode(rows)
    assert values.shape == (512, 256)
    assert 0.5 < values.std() * math.sqrt(256) < 2 and abs(values.mean()) < 0.01
    assert set(np.unique(rows.packed & 15)) == set(range(16)) and len(np.unique(rows.scales)) > 2


def test_options_change_what_they_name(tmp_path: Path):
    changed = make_checkpoint(
        tmp_path / "changed",
        SMALL,
        a_log_padding=7.0,
        indexer_dtype="F32",
        scale_dtype="F8_E8M0",
        drop=["language_model.model.norm.weight"],
        config_changes={"num_experts": 5, "topk_group": None},
    )
    options = TensorOptions(scale_dtype="F8_E8M0")
    scale = next(t for t in checkpoint_tensors(SMALL, options) if t.name.endswith("w1.weight_scale"))
    assert scale.dtype == "F8_E8M0"
    tensors = read_all(changed)
    assert "language_model.model.norm.weight" not in tensors
    assert (tensors["language_model.model.layers.0.self_attn.A_log"][2:] == 7).all()
    assert tensors["language_model.model.layers.3.self_attn.indexer.k_norm.bias"].dtype == torch.float32
    text = json.loads((changed / "config.json").read_text())["text_config"]
    assert text["num_experts"] == 5 and "topk_group" not in text


def test_layer_kinds_may_be_given_and_must_fit(tmp_path: Path):
    names = {t.name for t in checkpoint_tensors(TinyShape(layers=2, layer_kinds=("mla", "kda")))}
    assert "language_model.model.layers.0.self_attn.kv_b_proj.weight" in names
    with pytest.raises(UsageError, match="names 1 layers, the shape has 2"):
        list(checkpoint_tensors(TinyShape(layers=2, layer_kinds=("mla",))))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path):
    shape = TinyShape(layers=2, experts=16, expert_width=1024, latent=1024, vision=False)
    tracemalloc.start()
    directory = make_checkpoint(tmp_path / "big", shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(f.stat().st_size for f in directory.iterdir()) / 3


def test_arrays_can_be_written_as_they_are(tmp_path: Path):
    values = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    triples = [
        ("model.layers.0.x", "BF16", values),
        ("model.layers.1.x", "BF16", bf16_bits(values)),
        ("model.y", "F32", values),
        ("model.z", "F16", values),
    ]
    directory = write_checkpoint(tmp_path / "w", {"a": 1}, triples, extra_files={"note.txt": "hello", "j.json": {}})
    tensors = read_all(directory)
    expected = torch.from_numpy(values)
    assert torch.equal(tensors["model.layers.0.x"], expected.bfloat16())
    assert torch.equal(tensors["model.layers.1.x"], expected.bfloat16())
    assert torch.equal(tensors["model.y"], expected) and torch.equal(tensors["model.z"], expected.half())
    assert len(list(directory.glob("model-*"))) == 3 and (directory / "note.txt").read_text() == "hello"


def test_bf16_rounds_to_nearest_even_as_torch_does():
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 0x7F70_0000, 4000), [0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 1, 0x8000]])
    values = bits.astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(bf16_bits(values), expected)


@pytest.mark.parametrize("count", [256, 300, 3000, 70_000])
def test_the_vocabulary_is_a_valid_one_of_any_size(count: int):
    ranks = tiktoken_ranks(count)
    assert len(ranks) == len(set(ranks)) == count and tiktoken_model(count).count(b"\n") == count
    encoding = tiktoken.Encoding(
        "t", pat_str=r"\S+|\s+", mergeable_ranks={t: r for r, t in enumerate(ranks)}, special_tokens={}
    )
    assert encoding.decode(encoding.encode("the 模型 isn't")) == "the 模型 isn't"


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(UsageError, match="at least 256 ranks"):
        tiktoken_ranks(255)
