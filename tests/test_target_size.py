"""``--target-size`` and ``--recipe``: types chosen by measured error, and read back from text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import pytest

from convert.pipeline import convert
from kimi_gguf import plan
from kimi_gguf.cli import run
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target") / "k31", TinyShape(), seed=5)


def types_of(file: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


def test_the_files_stay_within_the_target_and_the_recipe_reads_back(checkpoint: Path, tmp_path: Path) -> None:
    (file,) = convert(checkpoint, target_size="9M", outdir=tmp_path / "a").files
    assert 8_500_000 < file.stat().st_size <= 9_000_000
    (recipe,) = (tmp_path / "a").glob("*.recipe")
    (second,) = convert(checkpoint, recipe=recipe, outdir=tmp_path / "b").files
    assert types_of(second) == types_of(file)
    (again,) = convert(checkpoint, target_size="9M", outdir=tmp_path / "c", threads=1).files
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(file.read_bytes()).digest()


def test_floors_hold_and_room_goes_to_the_experts_until_they_are_exact(checkpoint: Path) -> None:
    bits = []
    for target in (7_000_000, 8_000_000, 11_000_000):
        (summary,) = plan(checkpoint, target_size=target)
        assert summary.nbytes is not None and summary.nbytes <= target
        table = dict(line.split(" = ") for line in summary.table.splitlines())
        assert {kind for name, kind in table.items() if "indexer.proj" in name} == {"F32"}
        assert {kind for name, kind in table.items() if "ssm_f_" in name or "attn_k_b" in name} == {"Q8_0"}
        bits.append(summary.sizes.experts.bits)
    assert bits[0] < bits[1] < bits[2] == 4.25


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "nothing says which types"),
        ({"quant": "Q8_0", "target_size": "9M"}, "--quant and --target-size exclude each other"),
        ({"target_size": "1M"}, "too small: the smallest types take"),
        ({"recipe": "absent.recipe"}, "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(checkpoint: Path, tmp_path: Path, flags: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        convert(checkpoint, outdir=tmp_path, **flags)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_plan_prints_the_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(checkpoint), "--target-size", "9M", "--json"]) == 0
    assert "ffn_down_exps" in json.dumps(json.loads(capsys.readouterr().out))
    assert run(["plan", str(checkpoint), "--target-size", "9M"]) == 0
    assert "ffn_down_exps.weight = " in capsys.readouterr().out
