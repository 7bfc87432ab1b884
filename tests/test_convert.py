"""convert() end to end on tiny checkpoints: contents, sizes, sameness, refusals."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from convert.config import parse_config
from convert.domain import Plan
from convert.layout import build_layout
from convert.pipeline import convert
from convert.source import LocalSource, open_source
from convert.version import VERSION
from kimi_gguf.reference.checkpoint_maker import make_checkpoint
from quant import ggml
from quant.errors import InputError, OutputError, UsageError
from quant.gguf_split import read_gguf_set
from quant.imatrix import Imatrix
from quant.types import QuantType
from tests.expected_tensors import SHAPE, expected_tensors, read_back


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", SHAPE, a_log_padding=3.0)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_mxfp4_holds_every_value_exactly(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, quant="MXFP4", outfile=tmp_path / "m.gguf", threads=2)
    found = read_back(tmp_path / "m.gguf")
    expected = expected_tensors(checkpoint)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name][1].shape == values.shape, name
        assert np.array_equal(found[name][1], values), name
    assert (tmp_path / "m.gguf").stat().st_size == result.plan.nbytes == result.plan.files[0].nbytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "m.gguf.manifest.json"]


ERRORS = {"Q8_0": 0.01, "Q6_K": 0.03, "Q5_K": 0.06, "Q5_0": 0.06, "Q4_K": 0.12, "Q4_0": 0.12, "BF16": 0.01, "F16": 1e-3}


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q8_0", "Q4_K_M", "MXFP4_MOE"])
def test_other_recipes_stay_within_the_error_of_their_types(checkpoint: Path, tmp_path: Path, quant: str) -> None:
    convert(checkpoint, quant=quant, outfile=tmp_path / "m.gguf", threads=2)
    expected = expected_tensors(checkpoint)
    for name, (qtype, values) in read_back(tmp_path / "m.gguf").items():
        error = float(np.sqrt(np.square(values - expected[name]).mean() / np.square(expected[name]).mean()))
        assert error <= ERRORS.get(qtype.name, 0.0), (name, qtype.name)


def test_encoded_bytes_are_ggmls_on_the_exact_values(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, quant="Q4_K_M", outfile=tmp_path / "m.gguf", threads=2, encoder="ggml")
    expected = expected_tensors(checkpoint)
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        values = expected[tensor.name].reshape(-1, expected[tensor.name].shape[-1])
        data = ggml.encode(np.ascontiguousarray(values), QuantType(tensor.tensor_type))
        assert tensor.data.tobytes() == data.tobytes(), tensor.name


@pytest.mark.parametrize("quant", ["MXFP4", "Q4_K_M"])
def test_bytes_do_not_depend_on_threads_sharding_or_folder(checkpoint: Path, tmp_path: Path, quant: str) -> None:
    hashes = set()
    for sharding, threads in (("layer", 1), ("layer", 3), (400_000, 2), ("shuffled", 2)):
        other = make_checkpoint(tmp_path / f"c-{sharding}-{threads}", SHAPE, sharding=sharding, a_log_padding=3.0)  # type: ignore[arg-type]
        convert(other, quant=quant, outfile=tmp_path / "m.gguf", threads=threads, overwrite=True)
        hashes.add(sha(tmp_path / "m.gguf"))
    assert len(hashes) == 1


def test_bf16_experts_give_the_values_of_packed_ones(checkpoint: Path, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", SHAPE, experts="bf16", a_log_padding=3.0)
    for source, name in ((checkpoint, "a"), (plain, "b")):
        convert(source, quant="Q8_0", outfile=tmp_path / f"{name}.gguf", threads=1, encoder="ggml")
    assert sha(tmp_path / "a.gguf") == sha(tmp_path / "b.gguf")


def test_split_files_form_one_set(checkpoint: Path, tmp_path: Path) -> None:
    finished: list[str] = []
    convert(checkpoint, quant="MXFP4", outfile=tmp_path / "whole.gguf", threads=1)
    result = convert(
        checkpoint,
        quant="MXFP4",
        outdir=tmp_path / "out",
        split_max_size="300K",
        threads=2,
        on_file_done=lambda path: finished.append(path.name),
    )
    names = [path.name for path in result.files]
    assert names == [f"Kimi-K3.1-Pro-MXFP4-{n + 1:05d}-of-{len(names):05d}.gguf" for n in range(len(names))]
    assert sorted(finished) == names and len(names) > 3
    assert result.manifest == tmp_path / "out" / "Kimi-K3.1-Pro-MXFP4.gguf.manifest.json"
    whole = {t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / "whole.gguf").tensors}
    parts = {t.name: t.data.tobytes() for path in result.files for t in gguf.GGUFReader(path).tensors}
    assert list(parts) == list(whole) and parts == whole
    assert len(read_gguf_set(result.files[0]).tensors) == len(whole)
    assert [path.stat().st_size for path in result.files] == [file.nbytes for file in result.plan.files]
    large = [t for t in result.plan.tensors if t.nbytes > 300_000]
    assert large and all(sum(t.file == one.file for t in result.plan.tensors) == 1 for one in large)
    assert any("exceed 300,000 bytes" in warning for warning in result.plan.warnings)


def test_early_files_of_a_set_are_finished_before_late_ones_are_written(checkpoint: Path, tmp_path: Path) -> None:
    events: list[str] = []

    class Recorder:
        def measured(self, done: int, total: int) -> None: ...
        def planned(self, plan: Plan, resumed_units: int, resumed_bytes: int) -> None: ...
        def wrote(self, nbytes: int) -> None:
            events.append("unit")

        def checked(self, nbytes: int) -> None: ...
        def finished(self, path: Path) -> None:
            events.append(path.name)

    convert(checkpoint, quant="MXFP4", outdir=tmp_path, split_max_size="1M", threads=1, progress=Recorder())
    files = [event for event in events if event != "unit"]
    assert files == sorted(files)
    assert events.index(files[0]) < len(events) // 3


def test_a_single_file_has_no_split_keys(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, quant="MXFP4", outdir=tmp_path, split_max_size="10G", threads=1)
    assert not [key for key in gguf.GGUFReader(tmp_path / "Kimi-K3.1-Pro-MXFP4.gguf").fields if "split" in key]


def test_the_manifest_ties_sources_to_hashes(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, quant="q4_k", outfile=tmp_path / "m.gguf", threads=1)
    manifest = json.loads(result.manifest.read_text())  # type: ignore[union-attr]
    assert manifest["quant"] == "Q4_K_M" and manifest["settings"]["--quant"] == "Q4_K_M"
    assert manifest["files"] == [{"name": "m.gguf", "bytes": result.plan.nbytes, "sha256": sha(tmp_path / "m.gguf")}]
    names = [shard["name"] for shard in manifest["source"]["shards"]]
    assert names == sorted(path.name for path in checkpoint.glob("*.safetensors"))
    tensors = {t["name"]: t for t in manifest["tensors"]}
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        assert tensors[tensor.name]["sha256"] == hashlib.sha256(tensor.data.tobytes()).hexdigest()
    stack = tensors["blk.1.ffn_up_exps.weight"]
    assert stack["sources"][0] == "language_model.model.layers.1.block_sparse_moe.experts.{e}.w3.weight_packed"
    assert (stack["experts"], [names[n] for n in stack["shards"]]) == (6, ["model-00002-of-000006.safetensors"])
    assert tensors["blk.1.ssm_f_b.weight"]["reason"]


def imatrix_file(path: Path, checkpoint: Path, *, silent: int) -> dict[str, np.ndarray[Any, Any]]:
    """An importance matrix over the routed experts and attn_k_b; expert ``silent`` was never hit."""
    source = open_source(checkpoint)
    config = parse_config((checkpoint / "config.json").read_bytes())
    rng = np.random.default_rng(3)
    entries, weights = {}, {}
    for spec in build_layout(config, source.tensors).specs:
        if spec.experts or spec.name.endswith("attn_k_b.weight"):
            matrices = math.prod(spec.shape[:-2])
            sums = rng.uniform(0.5, 4, (matrices, spec.shape[-1])).astype(np.float32)
            counts = np.full(matrices, 2, np.float32)
            weights[spec.name] = sums / 2
            if spec.experts:
                counts[silent] = 0
                sums[silent] = 0
                weights[spec.name][silent] = 1
            entries[spec.name] = (sums, counts)
    Imatrix.save(path, entries, datasets=["text"], chunk_count=2, chunk_size=512)
    return weights


def test_an_imatrix_weighs_each_expert_by_its_own_slice(checkpoint: Path, tmp_path: Path) -> None:
    weights = imatrix_file(tmp_path / "i.gguf", checkpoint, silent=4)
    result = convert(
        checkpoint, quant="Q4_K_S", imatrix=tmp_path / "i.gguf", outfile=tmp_path / "m.gguf", threads=2, encoder="ggml"
    )
    expected = expected_tensors(checkpoint)
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        if tensor.name in weights:
            values = expected[tensor.name]
            parts = [
                ggml.encode(np.ascontiguousarray(v), QuantType(tensor.tensor_type), w).tobytes()
                for v, w in zip(values, weights[tensor.name], strict=True)
            ]
            assert tensor.data.tobytes() == b"".join(parts), tensor.name
    assert any("6 experts in 6 tensors were never hit" in warning for warning in result.plan.warnings)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert int(fields["quantize.imatrix.entries_count"].parts[-1][0]) == len(weights)


def test_an_imatrix_of_another_model_is_refused_before_any_output(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", replace(SHAPE, latent=512))
    imatrix_file(tmp_path / "i.gguf", other, silent=0)
    with pytest.raises(InputError, match=r"blk\.1\.ffn_gate_exps\.weight has 3072 values, but the tensor has 1536"):
        convert(checkpoint, quant="Q4_K_S", imatrix=tmp_path / "i.gguf", outdir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_types_that_need_an_imatrix_say_so_before_any_output(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IQ2_XXS needs an importance matrix"):
        convert(checkpoint, quant="iq2_xxs", outdir=tmp_path / "out")
    with pytest.raises(UsageError, match=r"tensors get types that need an importance matrix.*ffn_up_exps"):
        convert(checkpoint, quant="MXFP4", tensor_type=["ffn_up_exps=IQ2_XXS"], outdir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_share_of_exact_blocks_is_told(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, quant="Q6_K", outfile=tmp_path / "a.gguf")
    found = result.encoded["Q6_K"]
    blocks = {t.spec.name: t.nbytes // 210 for t in result.plan.tensors if t.qtype.name == "Q6_K"}
    experts = sum(count for name, count in blocks.items() if "_exps" in name)
    assert found.blocks == sum(blocks.values()) and experts <= found.exact < found.blocks
    assert convert(checkpoint, quant="Q6_K", outfile=tmp_path / "b.gguf", encoder="ggml").encoded == {}


def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, quant="Q8_0", outdir=tmp_path / "out", dry_run=True)
    assert result.files == () and result.manifest is None and result.plan.nbytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_callback_may_stop_before_anything_is_written(checkpoint: Path, tmp_path: Path) -> None:
    def refuse(plan: Plan) -> None:
        raise UsageError(f"no {plan.recipe} today")

    with pytest.raises(UsageError, match="no Q8_0 today"):
        convert(checkpoint, quant="Q8_0", outdir=tmp_path / "out", on_plan=refuse)
    assert list(tmp_path.iterdir()) == []


def test_finished_output_is_replaced_only_on_demand(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    output.write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"m\.gguf exists already\n.*--overwrite"):
        convert(checkpoint, quant="MXFP4", outfile=output, threads=1)
    assert output.read_bytes() == b"precious" and list(tmp_path.iterdir()) == [output]
    convert(checkpoint, quant="MXFP4", outfile=output, threads=1, overwrite=True)
    assert output.read_bytes()[:4] == b"GGUF"


def test_too_little_room_is_found_before_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.output.free_bytes", lambda directory: 1_234_567)
    with pytest.raises(OutputError, match=r"1,234,567 bytes free; [\d,]+ are needed"):
        convert(checkpoint, quant="MXFP4", outfile=tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outfile": "a.gguf", "outdir": "b"}, "exclude each other"),
        ({"outfile": "a.bin"}, r"does not end in \.gguf"),
        ({"outfile": "a-00001-of-00002.gguf"}, "part of a split set"),
        ({"outfile": "模" * 80 + ".gguf"}, "245 bytes, at most 220"),
        ({"name": "Kimi\x1b[31m"}, "cannot be shown"),
        ({"split_max_size": "5X"}, "not a size"),
        ({"split_max_size": "0G"}, "no room"),
        ({"quant": "Q9"}, "unknown quantization"),
        ({"threads": 0}, "0 threads"),
        ({"tensor_type": ["ffn"]}, "not REGEX=TYPE"),
        ({"tensor_type": ["(=Q8_0"]}, "not a regular expression"),
        ({"tensor_type": ["ffn=Q77"]}, "unknown tensor type"),
        ({"encoder": "magic"}, "unknown encoder"),
    ],
)
def test_bad_flags_are_usage_errors(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(checkpoint, **({"quant": "MXFP4"} | changes))


def test_without_a_checkpoint_the_way_to_name_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"(?s)no checkpoint is named.*config\.json"):
        convert(quant="MXFP4")


def test_the_current_folder_is_the_default_source(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    result = convert(quant="MXFP4", outdir=tmp_path, threads=1)
    assert result.files == (tmp_path / "Kimi-K3.1-Pro-MXFP4.gguf",)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Ranges read from shards, as (shard, begin, end)."""
    reads: list[tuple[int, int, int]] = []
    read_into = LocalSource.read_into

    def counting(self: LocalSource, shard: int, offset: int, buffer: memoryview) -> None:
        reads.append((shard, offset, offset + len(buffer)))
        read_into(self, shard, offset, buffer)

    monkeypatch.setattr(LocalSource, "read_into", counting)
    yield reads


def test_each_input_byte_is_read_once(checkpoint: Path, tmp_path: Path, counted: list[tuple[int, int, int]]) -> None:
    convert(checkpoint, quant="Q8_0", outfile=tmp_path / "m.gguf", threads=2)
    source = open_source(checkpoint)
    ranges = sorted(counted)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ranges))
    text = [t for t in source.tensors.values() if not t.name.startswith(("vision_tower.", "mm_projector."))]
    assert sum(end - begin for _, begin, end in ranges) == sum(t.nbytes for t in text)


def test_the_version_in_digests_and_manifests_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["version"] == VERSION


def test_a_folder_whose_name_is_no_text_is_converted_and_its_manifest_is_json(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff name")
    folder.symlink_to(checkpoint)
    result = convert(folder, quant="MXFP4", outdir=tmp_path / os.fsdecode(b"out\xfe"), threads=1)
    assert result.manifest is not None
    assert json.loads(result.manifest.read_bytes())["source"]["origin"] == str(folder)
    assert sha(result.files[0]) == sha(convert(checkpoint, quant="MXFP4", outdir=tmp_path / "o", threads=1).files[0])


def test_a_long_name_of_many_bytes_leaves_room_for_the_files_beside_it(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, quant="MXFP4", name="模" * 300, outdir=tmp_path, split_max_size="4M", threads=1)
    assert max(len(os.fsencode(path.name)) for path in tmp_path.iterdir()) < 200
    assert result.files[0].name.startswith("模" * 40 + "-MXFP4-00001-of-")


def test_more_threads_than_the_system_starts_is_a_message_and_ends_those_that_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(UsageError, match="cannot start 50 threads"):
        convert(checkpoint, quant="MXFP4", outdir=tmp_path, threads=50)
    for thread in begun:
        thread.join()
