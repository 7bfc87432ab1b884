"""Whatever stops a conversion, the same call continues it, and the bytes are those of an undisturbed run."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert import pipeline
from convert.domain import Plan
from convert.pipeline import convert
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import InputError, OutputError, ValueFault
from tests.expected_tensors import SHAPE

# Widths that leave padding after most tensors.
ODD = TinyShape(
    layers=2,
    hidden=96,
    kda_heads=3,
    heads=3,
    kda_head_dim=32,
    q_lora=96,
    kv_lora=160,
    nope=32,
    rope=16,
    v=40,
    experts=3,
    used=1,
    index_heads=5,
    index_head_dim=24,
)
STACK = "language_model.model.layers.1.block_sparse_moe.experts.4.w2.weight_scale"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", SHAPE)


@pytest.fixture
def expected(checkpoint: Path, tmp_path: Path) -> str:
    convert(checkpoint, quant="MXFP4", outfile=tmp_path / "expected.gguf", threads=1)
    return sha(tmp_path / "expected.gguf")


@pytest.fixture(autouse=True)
def _eager_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journal units at once, so that little is lost and much is resumed."""
    monkeypatch.setattr(pipeline, "FLUSH_SECONDS", 0.002)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Watcher:
    """Counts units; may act at one of them."""

    def __init__(self, at: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.units = 0
        self.resumed = 0
        self.at = at
        self.act = act

    def measured(self, done: int, total: int) -> None: ...
    def planned(self, plan: Plan, resumed_units: int, resumed_bytes: int) -> None:
        self.resumed = resumed_units

    def wrote(self, nbytes: int) -> None:
        self.units += 1
        if self.units == self.at:
            self.act()

    def checked(self, nbytes: int) -> None: ...
    def finished(self, path: Path) -> None: ...


def fail() -> None:
    raise RuntimeError("power cut")


def interrupted(checkpoint: Path, output: Path, at: int, **flags: Any) -> None:
    """A conversion that breaks off after unit ``at``, with all before it journalled."""
    with pytest.raises(RuntimeError, match="power cut"):
        convert(checkpoint, outfile=output, threads=1, progress=Watcher(at, fail), **({"quant": "MXFP4"} | flags))


_DISK_CALLS = ("pwrite", "write", "fsync", "fdatasync", "ftruncate", "replace", "unlink")


def killed_at(call: int, checkpoint: Path, directory: Path, **flags: Any) -> int:
    """Run a conversion in a child that is killed at its disk call number ``call``; how many it made when it lives.

    A killed ``pwrite`` or ``write`` leaves half of its data.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0
        plain_write = os.write

        def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def disk_call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == call:
                    if name in ("pwrite", "write"):
                        data = memoryview(args[1])
                        original(args[0], data[: len(data) // 2], *args[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return disk_call

        for name in _DISK_CALLS:
            setattr(os, name, wrapped(name, getattr(os, name)))
        try:
            convert(checkpoint, outdir=directory, threads=2, **flags)
            os.close(receiver)
            plain_write(sender, str(count).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer or 0)


def test_a_kill_at_any_disk_call_costs_nothing_but_time(checkpoint: Path, tmp_path: Path) -> None:
    flags = {"quant": "MXFP4", "split_max_size": "1500K"}
    whole = convert(checkpoint, outdir=tmp_path / "whole", threads=1, **flags)  # type: ignore[arg-type]
    expected = {path.name: sha(path) for path in whole.files}
    assert len(expected) > 2
    total = killed_at(0, checkpoint, tmp_path / "count", **flags)
    assert total > 100
    rng = random.Random(11)
    points = [*range(1, 12), *rng.sample(range(12, total), 14), *range(total - 8, total + 1)]
    resumed = 0
    for point in points:
        directory = tmp_path / f"at-{point}"
        killed_at(point, checkpoint, directory, **flags)
        killed_at(rng.randrange(1, total), checkpoint, directory, **flags)
        for path in directory.glob("*.gguf"):
            assert sha(path) == expected[path.name], f"unfinished {path.name} after a kill at call {point}"
        if list(directory.glob("*.journal")) or not list(directory.glob("*.manifest.json")):
            watcher = Watcher()
            convert(checkpoint, outdir=directory, threads=rng.choice([1, 2, 3]), progress=watcher, **flags)  # type: ignore[arg-type]
            resumed += watcher.resumed
        assert {path.name: sha(path) for path in directory.glob("*.gguf")} == expected
        assert not [path for path in directory.iterdir() if path.suffix in (".partial", ".journal", ".tmp")]
    assert resumed > 100


def test_a_resumed_run_does_not_repeat_what_is_done(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    interrupted(checkpoint, output, 30)
    assert not output.exists()
    watcher = Watcher()
    result = convert(checkpoint, quant="MXFP4", outfile=output, threads=3, progress=watcher)
    assert watcher.resumed == result.resumed_units >= 30
    assert sha(output) == expected
    assert {p.name for p in tmp_path.glob("m.gguf*")} == {"m.gguf", "m.gguf.manifest.json"}


def test_ctrl_c_leaves_a_resumable_half(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    with pytest.raises(KeyboardInterrupt):
        convert(
            checkpoint,
            quant="MXFP4",
            outfile=output,
            threads=1,
            progress=Watcher(20, lambda: os.kill(os.getpid(), signal.SIGINT)),
        )
    assert not output.exists()
    result = convert(checkpoint, quant="MXFP4", outfile=output, threads=2)
    assert result.resumed_units >= 20
    assert sha(output) == expected


@pytest.mark.parametrize(("call", "room"), [("pwrite", 5), ("fsync", 0)])
def test_a_full_disk_is_one_plain_message_and_resumable(
    checkpoint: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, room: int
) -> None:
    output = tmp_path / "m.gguf"
    original = getattr(os, call)
    calls = 0

    def full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OutputError, match=r"the disk is full: .*m\.gguf\.partial .*\n.*same command again"):
            convert(checkpoint, quant="MXFP4", outfile=output, threads=2)
    assert not output.exists()
    convert(checkpoint, quant="MXFP4", outfile=output, threads=2)
    assert sha(output) == expected


def test_a_file_size_limit_is_named_as_one(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, 1000000));"
        "from convert.pipeline import convert;"
        f"convert({str(checkpoint)!r}, quant='MXFP4', outfile={str(tmp_path / 'm.gguf')!r})"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "m.gguf.partial is larger than its filesystem, or a limit of this shell, allows" in process.stderr


def test_a_nan_scale_stops_with_tensor_expert_and_row(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    from convert.source import open_source

    source = open_source(checkpoint)
    tensor = source.tensors[STACK]
    shard = checkpoint / source.shards[tensor.shard].name
    good, times = shard.read_bytes(), shard.stat()
    place = tensor.begin + 17 * tensor.shape[1] + 3
    shard.write_bytes(good[:place] + b"\xff" + good[place + 1 :])
    output = tmp_path / "m.gguf"
    with pytest.raises(
        ValueFault,
        match=rf"blk\.1\.ffn_down_exps\.weight, expert 4, row 17: .*{STACK.replace('.', r'[.]')} in {shard.name}",
    ):
        convert(checkpoint, quant="MXFP4", outfile=output, threads=1)
    assert not output.exists() and (tmp_path / "m.gguf.partial").exists()
    shard.write_bytes(good)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(
        InputError, match=r"1 shards have changed .*\n.*--overwrite to do again what was made from them"
    ):
        convert(checkpoint, quant="MXFP4", outfile=output, threads=1)
    result = convert(checkpoint, quant="MXFP4", outfile=output, threads=1, overwrite=True)
    assert result.resumed_units > 10
    assert sha(output) == expected


def test_a_changed_plan_is_refused_with_the_way_out(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    interrupted(checkpoint, output, 10, quant="Q8_0")
    with pytest.raises(OutputError, match=r"--quant was Q8_0, is now MXFP4\n.*--overwrite"):
        convert(checkpoint, quant="MXFP4", outfile=output)
    convert(checkpoint, quant="MXFP4", outfile=output, overwrite=True)
    assert sha(output) == expected


def test_overwriting_another_split_removes_its_halves(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        convert(
            checkpoint, quant="MXFP4", outdir=tmp_path / "o", split_max_size="2M", progress=Watcher(9, fail), threads=1
        )
    assert list((tmp_path / "o").glob("*.partial"))
    result = convert(checkpoint, quant="MXFP4", outdir=tmp_path / "o", overwrite=True)
    assert {p.name for p in (tmp_path / "o").iterdir()} == {result.files[0].name, result.manifest.name}  # type: ignore[union-attr]


def test_a_shard_that_changes_during_the_work_stops_it(checkpoint: Path, tmp_path: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[2]
    with pytest.raises(InputError, match=rf"{shard.name} has changed since the conversion began"):
        convert(
            checkpoint,
            quant="MXFP4",
            outfile=tmp_path / "m.gguf",
            threads=1,
            progress=Watcher(3, lambda: os.utime(shard, ns=(1, 1))),
        )
    assert not (tmp_path / "m.gguf").exists()


def test_a_second_process_on_one_output_stops(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    code = f"from convert.pipeline import convert; convert({str(checkpoint)!r}, quant='MXFP4', outfile={str(output)!r})"
    answers = []

    def second() -> None:
        answers.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False))

    convert(checkpoint, quant="MXFP4", outfile=output, threads=1, progress=Watcher(5, second))
    assert f"another process ({os.getpid()}) is writing this output" in answers[0].stderr
    assert answers[0].returncode != 0 and output.exists()


def test_bytes_damaged_on_disk_are_found_and_done_again(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    interrupted(checkpoint, output, 40)
    partial = tmp_path / "m.gguf.partial"
    data = bytearray(partial.read_bytes())
    plan = convert(checkpoint, quant="MXFP4", outfile=output, dry_run=True).plan
    data[plan.tensors[2].offset + 5] ^= 1
    partial.write_bytes(data)
    with pytest.raises(OutputError, match=rf"1 units of {plan.tensors[2].spec.name} differ from what was written"):
        convert(checkpoint, quant="MXFP4", outfile=output)
    assert not output.exists()
    result = convert(checkpoint, quant="MXFP4", outfile=output)
    assert result.resumed_units > 40
    assert sha(output) == expected


def test_a_lost_partial_file_is_made_again(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    interrupted(checkpoint, output, 40)
    (tmp_path / "m.gguf.partial").unlink()
    assert convert(checkpoint, quant="MXFP4", outfile=output).resumed_units == 0
    assert sha(output) == expected


def test_a_finished_conversion_is_not_repeated(checkpoint: Path, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "expected.gguf"
    before = output.stat().st_mtime_ns
    with pytest.raises(OutputError, match=r"expected\.gguf exists already"):
        convert(checkpoint, quant="MXFP4", outfile=output)
    assert output.stat().st_mtime_ns == before


@pytest.mark.parametrize("journal", ["lost", "damaged", "kept"])
def test_what_lies_between_tensors_is_zero_whatever_was_there_before(journal: str, tmp_path: Path) -> None:
    small = make_checkpoint(tmp_path / "small", ODD)
    convert(small, quant="Q4_K_M", outfile=tmp_path / "expected.gguf", threads=1)
    output, beside = tmp_path / "m.gguf", tmp_path / "m.gguf.journal"
    interrupted(small, output, 40, quant="Q4_K_M")
    size = (tmp_path / "m.gguf.partial").stat().st_size
    (tmp_path / "m.gguf.partial").write_bytes(b"\xa5" * size)
    if journal == "lost":
        beside.unlink()
    elif journal == "damaged":
        beside.write_bytes(b"\xa5" * 500)
    else:
        with pytest.raises(OutputError, match="differ from what was written"):
            convert(small, quant="Q4_K_M", outfile=output)
    convert(small, quant="Q4_K_M", outfile=output)
    assert sha(output) == sha(tmp_path / "expected.gguf")
