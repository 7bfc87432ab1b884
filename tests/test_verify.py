"""``verify``: what the checkpoint makes passes, and each planted fault is found, named and explained."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from convert.config import parse_config
from convert.domain import TensorSpec
from convert.layout import build_layout
from convert.source import open_source
from convert.transforms import expert_rows, row_count
from kimi_gguf import convert, verify_model
from kimi_gguf.cli import run
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.verify.identity import match_tensors
from kimi_gguf.verify.sampling import sample_rows
from kimi_gguf.verify.verdicts import VerifyReport
from quant import ggml
from quant.errors import InputError, UsageError
from quant.gguf_parser import GgufTensor, parse_gguf
from quant.imatrix import Imatrix
from quant.tensors import TensorClass
from quant.types import QuantType, row_bytes

SHAPE = TinyShape(layers=4, experts=16, vision=False)
EXPERTS = "blk.1.ffn_down_exps.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("verify") / "checkpoint", SHAPE, seed=11)


@pytest.fixture(scope="module")
def specs(source: Path) -> dict[str, TensorSpec]:
    with open_source(source) as opened:
        text = opened.read_file("config.json")
        assert text is not None
        layout = build_layout(parse_config(text), opened.tensors, opened.shards)
    return {spec.name: spec for spec in layout.specs}


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("made")
    files: dict[str, Path] = {}

    def make(quant: str, *, encoder: str = "ggml", imatrix: Path | None = None) -> Path:
        name = f"{quant}-{encoder}-{imatrix is not None}"
        if name not in files:
            files[name] = folder / f"{name}.gguf"
            convert(source, quant=quant, outfile=files[name], encoder=encoder, imatrix=imatrix)
        return files[name]

    return make


@pytest.fixture
def copied(made: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(quant: str, **more: object) -> Path:
        return Path(shutil.copy(made(quant, **more), tmp_path / "model.gguf"))

    return copy


class Patch:
    """Rows of one tensor of a file, to be read and written."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        tensors = {tensor.name: tensor for tensor in parse_gguf(path).tensors}
        self.tensor: GgufTensor = tensors[name]
        self.width = row_bytes(self.tensor.qtype, self.tensor.shape[-1])

    def read(self, begin: int, count: int) -> np.ndarray:
        with self.path.open("rb") as file:
            data = os.pread(file.fileno(), count * self.width, self.tensor.offset + begin * self.width)
        return np.frombuffer(data, np.uint8).reshape(count, self.width).copy()

    def write(self, begin: int, rows: np.ndarray) -> None:
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), np.ascontiguousarray(rows).tobytes(), self.tensor.offset + begin * self.width)

    @property
    def rows(self) -> int:
        return math.prod(self.tensor.shape[:-1])


def only_fault(report: VerifyReport) -> tuple[str, str]:
    """Name and faults of the only tensor that fails."""
    assert report.structure == ()
    (failed,) = report.failed
    return failed.name, "; ".join(failed.faults)


@pytest.mark.parametrize(
    ("quant", "full"),
    [
        *(("MXFP4", full) for full in (False, True)),
        *(("Q4_K_M", full) for full in (False, True)),
        *((quant, False) for quant in ("MXFP4_MOE", "F16", "Q2_K", "Q5_K_M")),
    ],
)
def test_what_the_checkpoint_makes_passes(quant: str, full: bool, made: Callable[..., Path], source: Path) -> None:
    report = verify_model(made(quant), source=source, full=full)
    assert report.ok, [(t.name, t.faults) for t in report.failed]
    assert {t.method for t in report.tensors} <= {"bits", "re-encoded"}
    if full:
        assert all(t.checked == t.rows for t in report.tensors)


def test_the_native_encoder_is_recognised(made: Callable[..., Path], source: Path) -> None:
    report = verify_model(made("Q4_K_M", encoder="native"), source=source, full=True)
    assert report.ok
    encoders = {t.encoder for t in report.tensors if t.cls == TensorClass.ROUTED_EXPERT}
    assert "native" in encoders


def test_every_expert_gives_a_row_and_the_choice_is_reproducible(specs: dict[str, TensorSpec]) -> None:
    spec = specs[EXPERTS]
    ranges = list(sample_rows(spec, 0.0001, 3))
    rows = expert_rows(spec)
    assert {begin // rows for begin, _ in ranges} == set(range(spec.experts))
    assert ranges == list(sample_rows(spec, 0.0001, 3)) != list(sample_rows(spec, 0.0001, 4))
    assert all(begin // rows == (end - 1) // rows for begin, end in ranges)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_a_sample_has_about_the_share_asked_for(share: float, specs: dict[str, TensorSpec]) -> None:
    for spec in specs.values():
        ranges = list(sample_rows(spec, share, 0))
        read = sum(end - begin for begin, end in ranges)
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        assert ranges[-1][1] <= row_count(spec)
        if spec.experts:
            assert read == pytest.approx(share * row_count(spec), rel=0.25)


@pytest.mark.parametrize(("quant", "method"), [("MXFP4", "bits"), ("Q4_K_M", "re-encoded")])
def test_two_swapped_experts_are_found_at_the_default_sample(
    quant: str, method: str, copied: Callable[..., Path], source: Path
) -> None:
    path = copied(quant)
    patch = Patch(path, EXPERTS)
    rows = patch.rows // SHAPE.experts
    third, ninth = patch.read(3 * rows, rows), patch.read(9 * rows, rows)
    patch.write(3 * rows, ninth)
    patch.write(9 * rows, third)
    report = verify_model(path, source=source)
    name, faults = only_fault(report)
    assert name == EXPERTS
    assert "expert 3, row" in faults and "holds the values of expert 9" in faults
    assert "expert 9, row" in faults and "holds the values of expert 3" in faults
    assert report.failed[0].method == method


def nibbles(blocks: np.ndarray) -> np.ndarray:
    """MXFP4 rows with the two codes of every byte exchanged."""
    out = blocks.reshape(len(blocks), -1, 17).copy()
    out[:, :, 1:] = out[:, :, 1:] << 4 | out[:, :, 1:] >> 4
    return out.reshape(blocks.shape)


def doubled(blocks: np.ndarray) -> np.ndarray:
    out = blocks.reshape(len(blocks), -1, 17).copy()
    out[:, :, 0] += 1
    return out.reshape(blocks.shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [(nibbles, "nibbles of each byte are swapped"), (doubled, "values are 2 times the checkpoint's")],
    ids=["nibbles", "scale"],
)
def test_damaged_codes_and_scales_are_named(
    change: Callable[[np.ndarray], np.ndarray], words: str, copied: Callable[..., Path], source: Path
) -> None:
    path = copied("MXFP4")
    patch = Patch(path, EXPERTS)
    rows = patch.rows // SHAPE.experts
    patch.write(5 * rows, change(patch.read(5 * rows, rows)))
    name, faults = only_fault(verify_model(path, source=source))
    assert name == EXPERTS and "expert 5" in faults and words in faults


def test_codes_that_were_not_rearranged_are_named(copied: Callable[..., Path], source: Path) -> None:
    path = copied("MXFP4")
    patch = Patch(path, EXPERTS)
    values = ggml.decode(patch.read(0, patch.rows), QuantType.MXFP4, patch.tensor.shape[-1])
    # Bytes as they are packed in the checkpoint hold elements 2j and 2j + 1; a block reads j and j + 16.
    groups = values.reshape(len(values), -1, 16, 2).transpose(0, 1, 3, 2).reshape(values.shape)
    patch.write(0, ggml.encode(np.ascontiguousarray(groups), QuantType.MXFP4))
    assert "codes were not rearranged" in only_fault(verify_model(path, source=source))[1]


def test_a_missing_transpose_is_named(copied: Callable[..., Path], source: Path) -> None:
    path = copied("MXFP4")
    patch = Patch(path, "blk.3.attn_k_b.weight")
    heads, latent, keys = patch.tensor.shape
    values = patch.read(0, patch.rows).view(np.uint16).reshape(heads, latent, keys)
    patch.write(0, values.transpose(0, 2, 1).reshape(patch.rows, -1).copy().view(np.uint8))
    name, faults = only_fault(verify_model(path, source=source))
    assert name == "blk.3.attn_k_b.weight" and "not transposed" in faults


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda a: -a, "exp(A_log), not -exp(A_log)"), (lambda a: np.log(-a), "A_log itself")],
    ids=["sign", "log"],
)
def test_a_wrong_decay_is_named(
    change: Callable[[np.ndarray], np.ndarray], words: str, copied: Callable[..., Path], source: Path
) -> None:
    path = copied("MXFP4")
    patch = Patch(path, "blk.0.ssm_a")
    patch.write(0, change(patch.read(0, 1).view(np.float32)).astype(np.float32).view(np.uint8))
    report = verify_model(path, source=source)
    name, faults = only_fault(report)
    assert name == "blk.0.ssm_a" and words in faults
    assert next(c for c in report.classes() if c.cls == TensorClass.KDA_STATE).failed == 1


def test_a_decay_rounded_by_another_library_passes(copied: Callable[..., Path], source: Path) -> None:
    path = copied("MXFP4")
    patch = Patch(path, "blk.0.ssm_a")
    patch.write(0, np.nextafter(patch.read(0, 1).view(np.float32), np.float32(0)).view(np.uint8))
    assert verify_model(path, source=source).ok


def test_a_router_that_was_quantized_on_the_way_is_found(copied: Callable[..., Path], source: Path) -> None:
    path = copied("MXFP4")
    patch = Patch(path, "blk.2.ffn_gate_inp.weight")
    values = patch.read(0, patch.rows).view(np.float32)
    rounded = ggml.decode(ggml.encode(values, QuantType.Q8_0), QuantType.Q8_0, values.shape[1])
    patch.write(0, rounded.view(np.uint8))
    report = verify_model(path, source=source)
    name, faults = only_fault(report)
    assert name == "blk.2.ffn_gate_inp.weight" and "the router was quantized" in faults
    assert report.classes()[0].cls == TensorClass.ROUTER and report.classes()[0].failed == 1


def test_a_router_stored_in_blocks_is_found_by_its_type(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    convert(source, quant="Q8_0", outfile=path, tensor_type=["ffn_gate_inp=Q8_0"], force=True)
    report = verify_model(path, source=source)
    assert len(report.failed) == SHAPE.layers - SHAPE.dense_layers
    assert all("stored as Q8_0: it must be F32" in t.faults[0] for t in report.failed)


def importance(specs: dict[str, TensorSpec], path: Path) -> Path:
    random = np.random.default_rng(1)
    entries = {}
    for spec in specs.values():
        if len(spec.shape) >= 2 and spec.name != "token_embd.weight":
            slices = math.prod(spec.shape[:-2])
            sums = np.exp(random.normal(size=(slices, spec.shape[-1]))).astype(np.float32)
            entries[spec.name] = (sums, np.ones(slices, dtype=np.float32))
    Imatrix.save(path, entries)
    return path


def test_an_importance_matrix_makes_the_bytes_again(
    made: Callable[..., Path], specs: dict[str, TensorSpec], source: Path, tmp_path: Path
) -> None:
    matrix = importance(specs, tmp_path / "i.gguf")
    report = verify_model(made("Q2_K", imatrix=matrix), source=source, imatrix=matrix)
    assert report.ok and {t.method for t in report.tensors} == {"bits", "re-encoded"}
    assert report.encoders["ggml with importance"] > 50


def test_without_the_importance_matrix_errors_are_bounded_and_damage_is_still_found(
    copied: Callable[..., Path], specs: dict[str, TensorSpec], source: Path, tmp_path: Path
) -> None:
    path = copied("Q4_K_M", imatrix=importance(specs, tmp_path / "i.gguf"))
    report = verify_model(path, source=source)
    assert report.ok, [(t.name, t.faults) for t in report.failed]
    experts = [t for t in report.tensors if t.cls == TensorClass.ROUTED_EXPERT]
    assert {t.method for t in experts} == {"error bound"}
    assert all(t.error is not None and t.allowed is not None and 0 < t.error < t.allowed < 0.3 for t in experts)
    patch = Patch(path, EXPERTS)
    rows = patch.rows // SHAPE.experts
    patch.write(3 * rows, patch.read(9 * rows, rows))
    assert "expert 3" in (fault := only_fault(verify_model(path, source=source))[1]) and "of expert 9" in fault


def test_rows_encoded_otherwise_are_told_from_damage(copied: Callable[..., Path], source: Path) -> None:
    path = copied("Q4_K_M")
    patch = Patch(path, "blk.1.attn_output.weight")
    values = ggml.decode(patch.read(0, 1), patch.tensor.qtype, patch.tensor.shape[-1])
    noise = np.random.default_rng(3).normal(size=values.shape).astype(np.float32)
    patch.write(0, ggml.encode(values + np.float32(0.02) * values.std() * noise, patch.tensor.qtype))
    name, faults = only_fault(verify_model(path, source=source, full=True))
    assert (
        name == "blk.1.attn_output.weight" and "1 of 256 rows differ" in faults and "an error usual for Q4_K" in faults
    )


def test_a_block_that_is_no_number_is_found(copied: Callable[..., Path], source: Path) -> None:
    path = copied("Q8_0")
    patch = Patch(path, EXPERTS)
    row = patch.read(7, 1)
    row[0, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    patch.write(7, row)
    assert "not finite" in only_fault(verify_model(path, source=source, full=True))[1]


def test_another_checkpoint_fails_everywhere(made: Callable[..., Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", SHAPE, seed=12)
    report = verify_model(made("MXFP4"), source=other)
    assert len(report.failed) > 50


def test_another_size_or_vocabulary_is_a_fault_of_structure(made: Callable[..., Path], tmp_path: Path) -> None:
    smaller = TinyShape(layers=4, experts=12, vocab=800, vision=False)
    other = make_checkpoint(tmp_path / "other", smaller, seed=11, config_changes={"rms_norm_eps": 1e-6})
    report = verify_model(made("MXFP4"), source=other)
    text = "; ".join(report.structure)
    assert "moe.experts is 16 in the file, 12 in the checkpoint" in text
    assert "rms_norm_eps" in text and "tokenizer.ggml.tokens has 768 entries, the checkpoint makes 800" in text
    assert any("has shape" in fault for t in report.failed for fault in t.faults)


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    def call(*arguments: object) -> tuple[int, str]:
        code = run(["verify", *map(str, arguments)])
        return code, capsys.readouterr().out

    yield call


def test_exit_codes_of_the_verb(
    verb: Callable[..., tuple[int, str]], copied: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    path = copied("MXFP4")
    code, text = verb(path, "--source", source)
    assert code == 0 and "ok: " in text and "router *" in text
    code, text = verb(path, "--source", source, "--sample", "5%", "--json")
    assert code == 0 and json.loads(text)["ok"] and json.loads(text)["share"] == 0.05
    patch = Patch(path, "blk.1.attn_norm.weight")
    patch.write(0, np.zeros((1, patch.width), dtype=np.uint8))
    code, text = verb(path, "--source", source)
    assert code == 3 and "blk.1.attn_norm.weight" in text and "all zero" in text and "WRONG: 1 of " in text
    assert verb(tmp_path / "none.gguf", "--source", source)[0] == 1
    assert verb(path, "--source", tmp_path / "none")[0] == 2
    assert verb(path, "--source", source, "--sample", "lots")[0] == 2
    assert verb(path, "--source", source, "--sample", "1%", "--full")[0] == 2


def test_what_cannot_be_used_is_an_error(made: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(made("MXFP4").read_bytes()[:5000])
    with pytest.raises(InputError):
        verify_model(torn, source=source)
    with pytest.raises(InputError):
        verify_model(made("MXFP4"), source=tmp_path)
    with pytest.raises(UsageError, match="0 threads"):
        verify_model(made("MXFP4"), source=source, threads=0)


def test_a_split_set_of_k3_is_checked_from_any_of_its_files(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "k3", TinyShape(k31=False, layers=4, experts=16, vision=False), seed=2)
    files = convert(source, quant="MXFP4", outdir=tmp_path / "out", split_max_size="2M").files
    assert len(files) > 2
    report = verify_model(files[-1], source=source)
    assert report.ok and report.arch == "kimi-k3"
    patch = Patch(next(f for f in files if EXPERTS in {t.name for t in parse_gguf(f).tensors}), EXPERTS)
    patch.write(0, patch.read(patch.rows // 16, patch.rows // 16))
    assert "of expert 1" in only_fault(verify_model(files[0], source=source))[1]


def test_undivided_key_and_value_matrices_are_traced_too(source: Path, specs: dict[str, TensorSpec]) -> None:
    with open_source(source) as opened:
        tensors = opened.tensors
        name = next(iter(specs["blk.3.attn_k_b.weight"].sources))
        whole = GgufTensor("blk.3.attn_kv_b.weight", tensors[name].shape, QuantType.BF16, 0, tensors[name].nbytes)
        found = [GgufTensor(s.name, s.shape, QuantType.F32, 0, 0) for s in specs.values()]
        kept = [t for t in found if t.name not in ("blk.3.attn_k_b.weight", "blk.3.attn_v_b.weight")]
        matched = match_tensors(specs.values(), tensors, [*kept, whole])
        assert matched.unpaired == ()
        (spec,) = (spec for spec, tensor in matched.pairs if tensor is whole)
        assert (spec.transform, spec.sources) == ("copy", (name,))
        missing = match_tensors(specs.values(), tensors, kept).unpaired
        assert [(v.name, v.faults) for v in missing] == [
            ("blk.3.attn_k_b.weight", ("is missing",)),
            ("blk.3.attn_v_b.weight", ("is missing",)),
        ]
        (extra,) = match_tensors(specs.values(), tensors, [*found, whole]).unpaired
        assert extra.name == whole.name and "nothing in the checkpoint" in extra.faults[0]
