"""``--target-size`` and ``--recipe``: types chosen by measured error within so many bytes, and read back from text."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from convert import sampled_error
from convert.flags import parse_size
from convert.pipeline import convert
from convert.plan import Choices, make_plan, read_checkpoint
from convert.progress import Silent
from convert.sampled_error import measure, weight_in_sum
from convert.source import LocalSource, open_source
from convert.target_size import candidate_types, within_target
from kimi_gguf import plan
from kimi_gguf.cli import run
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import UsageError, ValueFault
from quant.imatrix import Imatrix
from quant.recipe_file import read_recipe
from quant.types import QuantType

RECIPES = ("Q4_K_M", "Q3_K_M", "Q3_K_XL", "Q2_K")
ALL_TYPES = ("F32", "BF16", "F16", "MXFP4", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_0", "Q5_1", "Q4_0")


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured more exactly shows nothing more here."""
    monkeypatch.setattr(sampled_error, "SAMPLED_WEIGHTS", 1 << 13)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target") / "k31", TinyShape(), seed=5)


@pytest.fixture(scope="module")
def matrix(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importance matrix for the experts' down projections of layer 1; one expert was never hit."""
    path = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    rng = np.random.default_rng(0)
    (stack,) = (s for s in read_checkpoint(open_source(checkpoint)).specs if s.name == "blk.1.ffn_down_exps.weight")
    sums = np.exp(rng.normal(0, 3, (stack.experts, stack.shape[-1]))).astype(np.float32)
    counts = np.ones(stack.experts, dtype=np.float32)
    counts[0] = 0
    Imatrix.save(path, {stack.name: (sums, counts)})
    return path


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def types_of(table: str) -> dict[str, QuantType]:
    return dict(read_recipe(table))


def chosen(checkpoint: Path, target: str | int, **flags: Any) -> dict[str, QuantType]:
    (summary,) = plan(checkpoint, target_size=target, **flags)
    assert summary.nbytes is not None and summary.nbytes <= parse_size(target)
    return types_of(summary.table)


def test_a_recipe_alone_gives_the_same_bytes_under_the_same_name(checkpoint: Path, tmp_path: Path) -> None:
    (file,) = convert(checkpoint, target_size="9M", outdir=tmp_path / "a", threads=1).files
    assert 8_900_000 < file.stat().st_size <= 9_000_000
    recipe = file.with_suffix(".recipe")
    edited = tmp_path / recipe.name
    edited.write_text("\n# mine\r\n\n" + recipe.read_text().replace("\n", "  # as measured\r\n"))
    (second,) = convert(checkpoint, recipe=edited, outdir=tmp_path / "b", threads=3).files
    assert (second.name, sha(second)) == (file.name, sha(file))
    (again,) = convert(checkpoint, target_size="9M", outdir=tmp_path / "c", threads=3).files
    assert sha(again) == sha(file)
    assert again.with_suffix(".recipe").read_bytes() == recipe.read_bytes()


class Stop(Exception):
    pass


class Interrupted(Silent):
    def wrote(self, nbytes: int) -> None:
        raise Stop


def test_an_interrupted_conversion_is_continued_by_the_same_command(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stop):
        convert(checkpoint, target_size="9M", outdir=tmp_path / "a", threads=1, progress=Interrupted())
    assert [path.suffix for path in sorted((tmp_path / "a").iterdir())] == [".journal", ".partial", ".recipe"]
    whole = convert(checkpoint, target_size="9M", outdir=tmp_path / "b")
    command = ["convert", str(checkpoint), "--target-size", "9M", "--outdir", str(tmp_path / "a"), "--json"]
    assert run(command) == 0
    value = json.loads(capsys.readouterr().out)
    assert sha(Path(value["files"][0])) == sha(whole.files[0])
    assert value["recipe_file"] == str(tmp_path / "a" / whole.files[0].with_suffix(".recipe").name)
    assert Path(value["recipe_file"]).read_text() == value["recipe"]


def test_what_a_recipe_cannot_say_stands_in_its_comment(checkpoint: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"tensor_type": ["ffn_gate_inp=Q8_0"], "force": True}
    (file,) = convert(checkpoint, target_size="9M", outdir=tmp_path / "a", **flags).files
    recipe = file.with_suffix(".recipe")
    assert (
        "# types below floors need these flags again: --force --tensor-type 'ffn_gate_inp=Q8_0'" in recipe.read_text()
    )
    (second,) = convert(checkpoint, recipe=recipe, outdir=tmp_path / "b", **flags).files
    assert sha(second) == sha(file)


@pytest.mark.parametrize("split", [None, "2M", "300K"])
def test_the_smallest_size_is_exact_and_everything_above_it_fits(checkpoint: Path, split: str | None) -> None:
    with pytest.raises(UsageError, match="too small: the smallest types take") as fault:
        plan(checkpoint, target_size="1M", split_max_size=split)
    least = int(str(fault.value.hint).rpartition(" ")[2])
    for target in (least, least + 1, least + 40_000, least + 777_777):
        (summary,) = plan(checkpoint, target_size=target, split_max_size=split)
        assert summary.nbytes is not None and summary.nbytes <= target
        if target == least:
            assert summary.nbytes == least
    with pytest.raises(UsageError, match=f"the smallest types take {least:,} bytes"):
        plan(checkpoint, target_size=least - 1, split_max_size=split)


@pytest.mark.parametrize("importance", [False, True])
def test_a_recipe_of_the_same_size_is_never_better(checkpoint: Path, matrix: Path, importance: bool) -> None:
    opened = read_checkpoint(open_source(checkpoint))
    imatrix = Imatrix.load(matrix) if importance else None
    wanted = dict.fromkeys(candidate_types(opened, Choices("")), tuple(t for t in QuantType if t.name in ALL_TYPES))
    fitting = {
        s: tuple(t for t in types if s.shape[-1] % gguf.GGML_QUANT_SIZES[t][0] == 0) for s, types in wanted.items()
    }
    found = measure(
        opened.source, fitting, encoder="native", imatrix=imatrix, threads=2, measured=lambda done, total: None
    )
    errors = {spec.name: (weight_in_sum(spec, opened.config), e) for spec, e in zip(wanted, found, strict=True)}

    def total(choices: Choices) -> tuple[float, int]:
        made = make_plan(opened, choices, imatrix)
        parts = [(t, *errors[t.spec.name]) for t in made.tensors if t.spec.name in errors]
        return sum(weight * error[t.qtype] for t, weight, error in parts), made.nbytes

    for name in RECIPES:
        error, size = total(Choices(name))
        best, used = total(within_target(opened, Choices("MIX", target_size=size), imatrix))
        assert used <= size
        assert best <= error * (1 + 1e-6)


def test_room_for_the_exact_types_gives_them_without_a_look_at_the_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lossless,) = plan(checkpoint, quant="MXFP4")
    assert lossless.nbytes is not None
    monkeypatch.setattr(LocalSource, "read_into", None)
    for target in (lossless.nbytes, "1T"):
        (summary,) = plan(checkpoint, target_size=target)
        assert summary.nbytes == lossless.nbytes
        assert summary.sizes.experts == lossless.sizes.experts


def test_floors_hold_and_room_goes_to_the_experts_until_they_are_exact(checkpoint: Path) -> None:
    bits = []
    for target in (7_000_000, 8_000_000, 13_000_000):
        (summary,) = plan(checkpoint, target_size=target)
        table = types_of(summary.table)
        assert {kind for name, kind in table.items() if "indexer.proj" in name} == {QuantType.F32}
        low = {kind for name, kind in table.items() if "ssm_f_" in name or "attn_k_b" in name}
        assert low <= {QuantType.Q8_0, QuantType.BF16}
        bits.append(summary.sizes.experts.bits)
    assert bits[0] <= bits[1] < bits[2] == 4.25


def test_stated_types_hold_and_the_rest_is_chosen_around_them(checkpoint: Path) -> None:
    table = chosen(checkpoint, "9M", tensor_type=["ffn_down_exps=Q2_K"], output_tensor_type="BF16")
    plain = chosen(checkpoint, "9M")
    assert {t for name, t in table.items() if "ffn_down_exps" in name} == {QuantType.Q2_K}
    assert table["output.weight"] is QuantType.BF16
    (summary,) = plan(checkpoint, target_size="9M", tensor_type=["ffn_down_exps=Q2_K"], output_tensor_type="BF16")
    assert summary.nbytes is not None and summary.nbytes > 8_900_000
    assert table != plain


def test_encoder_and_importance_take_part(checkpoint: Path, matrix: Path) -> None:
    assert chosen(checkpoint, "8M", encoder="ggml").keys() == chosen(checkpoint, "8M").keys()
    (summary,) = plan(checkpoint, target_size="8M", imatrix=matrix)
    assert f"# importance matrix {Imatrix.load(matrix).sha256}\n" in summary.table


def test_every_processor_path_chooses_the_same(checkpoint: Path) -> None:
    answers = set()
    for isa in ("scalar", ""):
        environment = {**os.environ, **({"KIMI_GGUF_ISA": isa} if isa else {})}
        command = [sys.executable, "-m", "kimi_gguf", "plan", str(checkpoint), "--target-size", "8M", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answers.add(json.loads(done.stdout)["plans"][0]["recipe"])
    assert len(answers) == 1


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    broken = make_checkpoint(tmp_path / "k31", TinyShape(), seed=5)
    source = open_source(broken)
    tensor = source.tensors["language_model.lm_head.weight"]
    with source.path(tensor.shard).open("r+b") as file:
        file.seek(tensor.begin)
        file.write(b"\xc0\x7f" * (tensor.nbytes // 2))
    with pytest.raises(ValueFault, match=r"output\.weight, row .*not a finite number.*lm_head\.weight in "):
        plan(broken, target_size="9M")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "nothing says which types"),
        ({"quant": "Q8_0", "target_size": "9M"}, "--quant and --target-size exclude each other"),
        ({"recipe": "x", "target_size": "9M"}, "--recipe and --target-size exclude each other"),
        ({"target_size": "1M"}, "too small: the smallest types take"),
        ({"target_size": "0"}, "a size of 0 leaves no room"),
        ({"target_size": "-9M"}, "'-9M' is not a size"),
        ({"target_size": "much"}, "'much' is not a size"),
        ({"target_size": "9M", "tensor_type": ["ssm_f_a=Q4_K"]}, "below its floor Q8_0"),
        ({"target_size": "9M", "tensor_type": ["nowhere=Q4_K"]}, "fits no tensor"),
        ({"recipe": "absent.recipe"}, "cannot be read"),
        ({"recipe": "."}, "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(checkpoint: Path, tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        convert(checkpoint, outdir=tmp_path, **flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("blk.99.ffn_up.weight = Q4_K", r"line 2: the recipe names blk\.99\.ffn_up\.weight, which this model does not"),
        ("blk.0.attn_norm.weight = Q4_K", r"line 2: blk\.0\.attn_norm\.weight is F32 in every file, not Q4_K"),
        ("", "the recipe names no type for output.weight"),
    ],
)
def test_a_recipe_of_another_model_is_refused(checkpoint: Path, tmp_path: Path, line: str, words: str) -> None:
    (summary,) = plan(checkpoint, target_size="9M")
    rest = [text for text in summary.table.splitlines()[1:] if line or not text.startswith("output")]
    file = tmp_path / "other.recipe"
    file.write_text("\n".join(["# other", line, *rest]))
    with pytest.raises(UsageError, match=words):
        plan(checkpoint, recipe=file)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1100G", 1_100_000_000_000),
        ("1100g", 1_100_000_000_000),
        ("1100GB", 1_100_000_000_000),
        ("1.1T", 1_100_000_000_000),
        (" 48 G ", 48_000_000_000),
        ("500M", 500_000_000),
        ("44GiB", 44 << 30),
        ("1.5kib", 1536),
        ("9007199254740993", 9_007_199_254_740_993),
        ("0.0000005M", None),
        ("1e9", None),
        ("1,100G", None),
        ("9" * 400, None),
        ("GiB", None),
        ("", None),
    ],
)
def test_sizes_are_read_as_llama_cpp_spells_them_and_as_people_do(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(UsageError):
            parse_size(text)
    else:
        assert parse_size(text) == size


def test_the_plan_prints_a_row_per_kind_and_type(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(checkpoint), "--target-size", "9M", "--json"]) == 0
    (value,) = json.loads(capsys.readouterr().out)["plans"]
    table = types_of(value["recipe"])
    assert sum(row["count"] for row in value["types"]) == len(table)
    stacks = [row for row in value["types"] if row["tensors"] == "blk.*.ffn_down_exps.weight"]
    assert {row["type"] for row in stacks} == {t.name for n, t in table.items() if "ffn_down_exps" in n}
    assert run(["plan", str(checkpoint), "--target-size", "9M", "-q"]) == 0
    assert capsys.readouterr().out == value["recipe"]
    assert run(["plan", str(checkpoint), "--target-size", "9M"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("blk.*.ffn_down_exps.weight ") == len(stacks)
    assert "measuring types on a sample of" in shown.err
