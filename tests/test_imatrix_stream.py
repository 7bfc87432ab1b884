"""Importance matrices from the stream engine: llama-imatrix's own numbers, the prior, merging, resuming, coverage."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from verify_support import CONTEXT, SHAPE, make_pair

from convert.tensor_table import LAYER_TABLE
from kimi_gguf import convert, imatrix
from kimi_gguf.cli import run
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_maker import make_checkpoint
from kimi_gguf.verify import importance, stream
from kimi_gguf.verify.importance import Sums, read_sums, with_prior, without_prior
from kimi_gguf.verify.models import open_model
from quant.errors import InputError, UsageError
from quant.gguf_parser import parse_gguf
from quant.imatrix import Imatrix
from quant.tensors import TensorClass

Folder = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_pair(tmp_path_factory.mktemp("imatrix"))


def relative(ours: dict[str, Sums], theirs: dict[str, Sums]) -> float:
    return max(
        float((np.abs(sums.squares - theirs[name].squares) / np.maximum(theirs[name].squares, 1e-30)).max())
        for name, sums in ours.items()
    )


@pytest.mark.runtime
@pytest.mark.parametrize("k31", [True, False], ids=["k3.1, keys pruned", "k3"])
def test_the_numbers_are_those_of_llama_imatrix(runtime: Runtime, pair: Folder, tmp_path: Path, k31: bool) -> None:
    checkpoint, gguf = tmp_path / "model", tmp_path / "model-F32.gguf"
    make_checkpoint(checkpoint, replace(SHAPE, k31=k31), seed=3)
    convert(checkpoint, quant="F32", outfile=gguf)
    context = 64
    command = [
        str(runtime.program("llama-imatrix")),
        "-m",
        str(gguf),
        "-f",
        str(pair[1]),
        "-o",
        str(tmp_path / "b.gguf"),
    ]
    command += ["-c", str(context), "-b", str(context), "--chunks", "12", "--process-output", "-t", "2"]
    command += ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    subprocess.run(command, check=True, capture_output=True)
    imatrix(checkpoint, text=pair[1], outfile=tmp_path / "a.gguf", context=context, tokens=12 * context, prior=0)
    ours, theirs = read_sums(tmp_path / "a.gguf"), read_sums(tmp_path / "b.gguf")
    assert ours[0].keys() == theirs[0].keys()
    assert ours[2:] == theirs[2:] == (12, context)
    for name, sums in ours[0].items():
        assert (sums.counts == theirs[0][name].counts).all(), name
    assert relative(ours[0], theirs[0]) <= 1e-3


@pytest.mark.runtime
def test_llama_quantize_and_convert_take_the_file(runtime: Runtime, pair: Folder, tmp_path: Path) -> None:
    matrix = tmp_path / "imatrix.gguf"
    imatrix(pair[0], text=pair[1], outfile=matrix, context=CONTEXT, tokens=500)
    source = tmp_path / "F32.gguf"
    convert(pair[0], quant="F32", outfile=source)
    command = [str(runtime.program("llama-quantize")), "--imatrix", str(matrix), str(source)]
    done = subprocess.run([*command, str(tmp_path / "q.gguf"), "Q2_K_S"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    convert(pair[0], quant="Q2_K_S", imatrix=matrix, outfile=tmp_path / "ours.gguf")


def test_every_weight_that_convert_may_quantize_has_an_entry(pair: Folder, tmp_path: Path) -> None:
    imatrix(pair[0], text=pair[1], outfile=tmp_path / "m.gguf", context=CONTEXT, tokens=300)
    matrix = Imatrix.load(tmp_path / "m.gguf")
    gguf = tmp_path / "F32.gguf"
    convert(pair[0], quant="F32", outfile=gguf)
    unmultiplied = {
        row.name
        for row in LAYER_TABLE
        if row.cls in (TensorClass.NORM, TensorClass.RESIDUAL_SCORE, TensorClass.KDA_CONV, TensorClass.KDA_STATE)
    } | {"exp_probs_b.bias"}
    for tensor in parse_gguf(gguf).tensors:
        short = tensor.name.split(".", 2)[2] if tensor.name.startswith("blk.") else tensor.name
        if short in unmultiplied or short in ("token_embd.weight", "output_norm.weight", "output_res_score.weight"):
            continue
        assert matrix.check(tensor.name, tensor.shape), tensor.name
        values = matrix.importance(tensor.name, tensor.shape)
        assert values is not None and np.isfinite(values).all() and (values >= 0).all()
    flat = parse_gguf(tmp_path / "m.gguf").by_name["blk.3.attn_k_b.weight.in_sum2"]
    assert flat.shape == (1, SHAPE.heads * SHAPE.nope)


def test_a_gguf_gives_the_numbers_of_its_checkpoint(pair: Folder, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    convert(pair[0], quant="MXFP4", outfile=gguf)
    for name, src in (("a", pair[0]), ("b", gguf)):
        imatrix(src, text=pair[1], outfile=tmp_path / name, context=CONTEXT, tokens=100)
    assert relative(read_sums(tmp_path / "a")[0], read_sums(tmp_path / "b")[0]) < 1e-5


def test_rare_experts_are_filled_up_with_the_mean_of_the_layer() -> None:
    squares = np.array([[8.0, 80.0], [3.0, 0.0], [0.0, 0.0]])
    filled = with_prior(Sums(squares, np.array([10.0, 1.0, 0.0])), 4)
    mean = np.array([1.0, 80 / 11])
    assert filled.counts.tolist() == [10, 4, 4]
    assert filled.squares[0].tolist() == [8, 80]
    assert filled.squares[1] == pytest.approx([3, 0] + 3 * mean)
    assert filled.squares[2] / 4 == pytest.approx(mean)
    back = without_prior(filled, np.array([10.0, 1.0, 0.0]))
    assert back.squares == pytest.approx(squares, abs=1e-12) and back.counts.tolist() == [10, 1, 0]


def test_a_stack_that_nothing_reached_and_dense_weights_have_no_prior() -> None:
    nothing = Sums(np.zeros((3, 2)), np.zeros(3))
    dense = Sums(np.ones((1, 2)), np.ones(1))
    assert with_prior(nothing, 4) is nothing and with_prior(dense, 4) is dense


def test_two_halves_merge_into_the_whole(pair: Folder, tmp_path: Path) -> None:
    text = pair[1].read_text()
    whole = tmp_path / "whole.txt"
    whole.write_text(text)
    paths = {name: tmp_path / f"{name}.gguf" for name in ("whole", "first", "second")}
    ids = 10 * CONTEXT
    imatrix(pair[0], text=whole, outfile=paths["whole"], context=CONTEXT, tokens=ids)
    imatrix(pair[0], text=whole, outfile=paths["first"], context=CONTEXT, tokens=4 * CONTEXT)
    vocabulary = open_model(pair[0]).vocabulary
    rest = b"".join(vocabulary.ranks[i] for i in vocabulary.encode(text)[4 * CONTEXT : ids])
    (tmp_path / "rest.txt").write_bytes(rest)
    if vocabulary.encode(rest.decode()) != vocabulary.encode(text)[4 * CONTEXT : ids]:
        pytest.fail("the text must be cut where no token spans the cut")
    merged = imatrix(
        pair[0], text=tmp_path / "rest.txt", outfile=paths["second"], context=CONTEXT, in_file=[paths["first"]]
    )
    assert (merged.chunks, merged.merged_chunks) == (6, 4)
    a, b = read_sums(paths["whole"]), read_sums(paths["second"])
    assert a[2:] == b[2:]
    assert all((a[0][name].counts == b[0][name].counts).all() for name in a[0])
    largest = {name: sums.squares.max() for name, sums in a[0].items()}
    assert all(np.abs(a[0][name].squares - b[0][name].squares).max() <= 1e-4 * largest[name] for name in a[0])


def test_a_matrix_of_another_model_is_not_merged(pair: Folder, tmp_path: Path) -> None:
    Imatrix.save(
        tmp_path / "other.gguf", {"blk.0.attn_q.weight": (np.ones((1, 7), np.float32), np.ones(1, np.float32))}
    )
    with pytest.raises(InputError, match=r"blk.0.attn_q.weight has 7 values, this model has 256"):
        imatrix(pair[0], text=pair[1], outfile=tmp_path / "m.gguf", context=CONTEXT, tokens=60,
                in_file=[tmp_path / "other.gguf"])  # fmt: skip


class Stop(Exception):
    pass


def test_an_interrupted_run_gives_the_same_bytes(pair: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"text": pair[1], "context": CONTEXT, "tokens": 200}
    imatrix(pair[0], outfile=tmp_path / "a.gguf", **flags)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        original = stream._Driver._layer

        def fails(self: stream._Driver, layer: int) -> None:
            if layer == 3:
                self.lanes[0].run_layer(layer)
                raise Stop
            original(self, layer)

        patched.setattr(stream._Driver, "_layer", fails)
        with pytest.raises(Stop):
            imatrix(pair[0], outfile=tmp_path / "b.gguf", scratch=tmp_path / "s", **flags)  # type: ignore[arg-type]
    imatrix(pair[0], outfile=tmp_path / "b.gguf", scratch=tmp_path / "s", resume=True, **flags)  # type: ignore[arg-type]
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_coverage_is_printed_and_stored(pair: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    words = ["imatrix", str(pair[0]), "--text", str(pair[1]), "-o", str(out), "--context", "8", "--tokens", "8"]
    assert run(words) == 0
    printed = capsys.readouterr().out
    assert "never reached" in printed and "min 0" in printed
    stored = json.loads(str(parse_gguf(out).get_str(importance.COVERAGE_KEY)))
    assert stored["experts"] == 4 * SHAPE.experts and stored["unseen"] > 0
    assert sum(layer["unseen"] for layer in stored["layers"]) == stored["unseen"]
    # 8 tokens of 3 experts in each of 4 layers.
    hits = [parse_gguf(out).metadata[f"{importance.HITS_KEY}{layer}"].value for layer in range(1, 5)]
    assert [int(np.sum(one)) for one in hits] == [24] * 4  # type: ignore[arg-type]
    assert not Imatrix.load(out).coverage.neutral, "the prior leaves no expert without weights"


def test_flags_that_make_no_sense(pair: Folder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--prior -1"):
        imatrix(pair[0], text=pair[1], outfile=tmp_path / "m.gguf", prior=-1)
    with pytest.raises(UsageError, match="there is no folder"):
        imatrix(pair[0], text=pair[1], outfile=tmp_path / "no" / "m.gguf")
