"""Conversion from the Hub: the bytes of the local one, on the disk of two shards, whatever is killed on the way."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_api import SIGNATURE
from hub_environment import ENDPOINT, free_port
from hub_samples import REPO, on_disk, ranges, start_client, start_server, wait_for
from hub_server import TOKEN, HubServer
from hub_store import HubStore

from convert import sampled_error
from convert.domain import Plan, Source
from kimi_gguf import convert, inspect, plan
from kimi_gguf.cli import run
from kimi_gguf.hub import retry
from kimi_gguf.hub.budget import ShardNeed
from kimi_gguf.hub.shard_store import MARKER
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import InputError, OutputError, UsageError

SHAPE = TinyShape(layers=9, experts=6)
NAME = "Kimi-K3.1-Pro-MXFP4.gguf"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 shards; read only."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "Kimi", SHAPE)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the local conversion gives."""
    return converted(checkpoint, tmp_path_factory.mktemp("expected"))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.002)


def converted(src: Path | str, outdir: Path, **flags: Any) -> bytes:
    result = convert(src, outdir=outdir, **({"quant": "MXFP4", "threads": 2} | flags))
    (file,) = result.files
    return file.read_bytes()


class Meter:
    """Looks at the disk whenever bytes have come, and remembers the most."""

    def __init__(self, outdir: Path) -> None:
        self.folders = (outdir, outdir / "Kimi-Tiny.shards")
        self.peak = 0
        self.need = ShardNeed(0, 0, 0)
        self.output = 0

    def fetched(self, nbytes: int) -> None:
        self.peak = max(self.peak, on_disk(*self.folders))

    def on_need(self, source: Source, need: ShardNeed) -> None:
        self.need = need

    def on_plan(self, plan: Plan) -> None:
        self.output = plan.nbytes

    def flags(self) -> dict[str, Any]:
        return {"fetched": self.fetched, "on_need": self.on_need, "on_plan": self.on_plan}


def test_twelve_shards_on_the_disk_of_two(hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path) -> None:
    commit = hub.store.add_folder(REPO, checkpoint)
    shards = sorted(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    assert len(shards) == 12
    meter = Meter(tmp_path / "out")
    assert converted(REPO, tmp_path / "out", **meter.flags()) == expected
    assert 0 < meter.peak <= meter.output + sum(shards[-2:])
    assert meter.need.ahead <= sum(shards[-2:])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [NAME, f"{NAME}.manifest.json"]
    manifest = json.loads((tmp_path / "out" / f"{NAME}.manifest.json").read_text())
    assert (manifest["source"]["revision"], manifest["source"]["origin"]) == (commit, f"hf://{REPO}@{commit}")
    listed = hub.store.resolve(REPO, commit)[1]
    assert {s["name"]: s["sha256"] for s in manifest["source"]["shards"]} == {
        name: entry["object"] for name, entry in listed.items() if name.endswith(".safetensors")
    }


def test_types_for_a_size_are_chosen_from_a_sample_alone(
    hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled_error, "SAMPLED_WEIGHTS", 1 << 11)
    hub.store.add_folder(REPO, checkpoint)
    (lossless,) = plan(checkpoint, quant="MXFP4")
    target = (lossless.nbytes or 0) * 4 // 5
    (here,) = plan(checkpoint, target_size=target, name="Kimi")
    (there,) = plan(REPO, target_size=target, name="Kimi")
    assert (there.table, there.nbytes) == (here.table, here.nbytes)
    asked = [r for shard in checkpoint.glob("*.safetensors") for r in ranges(hub.requests, shard.name)]
    whole = sum(shard.stat().st_size for shard in checkpoint.glob("*.safetensors"))
    assert asked and None not in asked
    assert sum(r[1] - r[0] for r in asked if r) < whole / 2


@pytest.mark.parametrize("sharding", [700_000, "shuffled"])
def test_any_cut_gives_the_same_bytes_within_the_disk_that_was_said(
    hub: HubServer, expected: bytes, tmp_path: Path, sharding: Any
) -> None:
    hub.store.add_folder(REPO, make_checkpoint(tmp_path / "cut", SHAPE, sharding=sharding))
    meter = Meter(tmp_path / "out")
    assert converted(REPO, tmp_path / "out", **meter.flags()) == expected
    assert meter.peak <= meter.output + meter.need.ahead


def test_flags_of_fetching_are_told_to_do_nothing_for_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    shards = tmp_path / "shards"
    convert(checkpoint, quant="MXFP4", outdir=tmp_path, dry_run=True, download_dir=shards, note=notes.append)
    assert notes == [
        f"{checkpoint} is here already: nothing is fetched, so --keep-shards and --download-dir do nothing"
    ]
    assert not shards.exists()


def test_max_disk_is_kept_to_the_byte(hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path) -> None:
    hub.store.add_folder(REPO, checkpoint)
    meter = Meter(tmp_path / "out")
    with pytest.raises(OutputError) as caught:
        converted(REPO, tmp_path / "out", max_disk=1000, on_plan=meter.on_plan)
    least = max(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    limit = meter.output + least
    assert f"{limit:,} bytes needed: {meter.output:,} for the output and {least:,} for shards" in caught.value.message
    for dry_run in (True, False):
        with pytest.raises(OutputError, match="--max-disk"):
            convert(REPO, quant="MXFP4", outdir=tmp_path / "out", max_disk=limit - 1, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    assert converted(REPO, tmp_path / "out", max_disk=limit, **meter.flags()) == expected
    assert meter.peak <= limit
    with pytest.raises(OutputError, match="--max-disk"):
        converted(checkpoint, tmp_path / "local", max_disk=1000)


def test_a_folder_of_others_is_refused_before_anything_is_written(
    hub: HubServer, checkpoint: Path, tmp_path: Path
) -> None:
    hub.store.add_folder(REPO, checkpoint)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    with pytest.raises(UsageError, match="holds other files"):
        convert(REPO, quant="MXFP4", outdir=tmp_path / "out", download_dir=tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and "hub" not in path.parts] == ["precious"]


def test_too_little_free_space_is_refused_before_anything_is_written(
    hub: HubServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.store.add_folder(REPO, checkpoint)
    monkeypatch.setattr("kimi_gguf.hub.source.free_bytes", lambda path: 1000)
    with pytest.raises(OutputError, match="has room for 0 bytes of shards"):
        converted(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class PowerCut(Exception):
    pass


def cut_at(unit: int) -> Callable[[int], None]:
    left = [unit]

    def wrote(nbytes: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PowerCut

    return wrote


class Fragile:
    """A progress that breaks a conversion off after some units."""

    def __init__(self, unit: int) -> None:
        self.wrote = cut_at(unit)
        self.resumed = 0

    def measured(self, done: int, total: int) -> None: ...
    def planned(self, plan: Plan, resumed_units: int, resumed_bytes: int) -> None:
        self.resumed = resumed_units

    def checked(self, nbytes: int) -> None: ...
    def finished(self, path: Path) -> None: ...


def test_shards_that_are_consumed_are_not_fetched_again(
    hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path
) -> None:
    hub.store.add_folder(REPO, checkpoint)
    with pytest.raises(PowerCut):
        converted(REPO, tmp_path / "out", progress=Fragile(120))
    # As a kill between the journal's entry and the removal leaves it.
    left = tmp_path / "out" / "Kimi-Tiny.shards" / "model-00001-of-000012.safetensors"
    left.parent.mkdir(exist_ok=True)
    (left.parent / MARKER).touch()
    left.write_bytes((checkpoint / left.name).read_bytes())
    hub.requests.clear()
    progress = Fragile(0)
    assert converted(REPO, tmp_path / "out", progress=progress) == expected
    assert progress.resumed > 0
    assert not left.parent.exists()
    whole = [name for name in hub.store.resolve(REPO, "main")[1] if None in ranges(hub.requests, name)]
    assert 0 < len([name for name in whole if name.endswith(".safetensors")]) < 9


def test_a_moved_revision_is_refused_with_the_way_out(
    hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path
) -> None:
    old = hub.store.add_folder(REPO, checkpoint)
    with pytest.raises(PowerCut):
        converted(REPO, tmp_path / "out", progress=Fragile(50))
    readme = hub.store.entry("README.md", hub.store.put(b"---\nlicense: mit\n---\nnew words\n"))
    new = hub.store.commit(REPO, "main", "words", {"README.md": readme})
    with pytest.raises(InputError) as caught:
        converted(REPO, tmp_path / "out")
    assert old in caught.value.message and new in caught.value.message
    assert f"owner/name@{old}" in (caught.value.hint or "") and "--overwrite" in (caught.value.hint or "")
    assert converted(f"{REPO}@{old}", tmp_path / "out") == expected
    with pytest.raises(PowerCut):
        converted(f"{REPO}@{old}", tmp_path / "again", progress=Fragile(50))
    result = converted(REPO, tmp_path / "again", overwrite=True)
    assert b"mit" in result[:100_000] and result != expected


def test_plan_and_inspect_read_headers_alone(
    hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.store.add_folder(REPO, checkpoint)
    (found,) = plan(f"hf://{REPO}", quant="MXFP4")
    assert found.nbytes == len(expected)
    (tmp_path / "made" / "Q").mkdir(parents=True)
    convert(checkpoint, quant="MXFP4", outdir=tmp_path / "made" / "Q", split_max_size="2M")
    hub.store.add_folder("org/Made", tmp_path / "made")
    count = len(list((tmp_path / "made" / "Q").glob("*.gguf")))
    hub.requests.clear()
    seen = inspect("hf://org/Made")
    local = inspect(next((tmp_path / "made" / "Q").glob("*-00001-of-*.gguf")))
    assert len(seen.files) == count > 1
    assert (seen.to_dict(tensors=True), seen.faults) == (local.to_dict(tensors=True), ())
    asked = [r.range for r in hub.requests if r.path.startswith("/cdn/")]
    assert len(asked) < 3 * count
    assert inspect("hf://org/Made/Q").files == seen.files
    hub.store.add_folder("org/Made", tmp_path / "made", title="twice")
    hub.store.commit("org/Made", "main", "x", {"b.gguf": hub.store.entry("b.gguf", hub.store.put(b"GGUF"))})
    with pytest.raises(UsageError, match="holds 2 models"):
        inspect("hf://org/Made")
    with pytest.raises(InputError, match="no GGUF file there"):
        inspect(f"hf://{REPO}")
    assert list(tmp_path.glob("*.shards")) == []


def test_secrets_are_in_no_file_and_no_output(
    hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path
) -> None:
    hub.store.add_folder(REPO, checkpoint, private=True)
    hub.fault("/cdn/.*00003-of", "cut", at=1000, times=2)
    hub.fault("/cdn/.*00004-of", "status", status=404, skip=2, times=99)
    flags = ("convert", REPO, "--quant", "MXFP4", "--outdir", tmp_path / "out")
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
    out, err = client.communicate(timeout=60)
    assert client.returncode == 1
    assert "model-00004-of-000012.safetensors: the Hub answers 404" in err
    journal = (tmp_path / "out" / f"{NAME}.journal").read_text()
    hub.faults.clear()
    client = start_client(*flags, "--json", endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
    more, _ = client.communicate(timeout=60)
    assert client.returncode == 0 and (tmp_path / "out" / NAME).read_bytes() == expected
    said = out + err + journal + more + (tmp_path / "out" / f"{NAME}.manifest.json").read_text()
    assert TOKEN not in said and SIGNATURE.partition("=")[2] not in said


def test_without_src_the_released_model_is_fetched_only_with_yes(
    hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path
) -> None:
    flags = ("convert", "--quant", "MXFP4")
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path)
    out, err = client.communicate(timeout=60)
    assert (client.returncode, out) == (2, "") and "no checkpoint is named" in err
    assert hub.requests == []
    hub.store.add_folder("moonshotai/Kimi-K3.1-Pro", checkpoint)
    client = start_client(*flags, "--yes", endpoint=ENDPOINT, cwd=tmp_path)
    out, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert "of shards to fetch" in err and "MXFP4" in err
    assert (tmp_path / NAME).read_bytes() == expected


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("n\n", 1), ("", 1)])
def test_on_a_terminal_the_fetch_is_asked_about_and_no_is_the_default(
    hub: HubServer,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    answer: str,
    code: int,
) -> None:
    hub.store.add_folder("moonshotai/Kimi-K3.1-Pro", checkpoint)
    monkeypatch.chdir(tmp_path)
    stdin = io.StringIO(answer)
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(["convert", "--quant", "MXFP4"]) == code
    err = capsys.readouterr().err
    assert err.index("MXFP4") < err.index("Fetch moonshotai/Kimi-K3.1-Pro shard by shard, and convert it? [y/N]")
    assert (tmp_path / NAME).exists() == (code == 0)


def test_kill_of_the_client_and_the_same_command_finishes(
    hub: HubServer, checkpoint: Path, expected: bytes, tmp_path: Path
) -> None:
    hub.store.add_folder(REPO, checkpoint)
    flags = ("convert", REPO, "--quant", "MXFP4", "--outdir", tmp_path / "out", "--threads", 1)
    for shard in ("00003", "00006"):
        hub.faults.clear()
        hub.fault(f"/cdn/.*{shard}-of", "slow", rate=200_000, skip=2)
        client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path)
        wait_for(lambda at=shard: any(p.stat().st_size for p in (tmp_path / "out").glob(f"*/*{at}*.part")))
        client.send_signal(signal.SIGKILL)
        client.communicate()
    hub.faults.clear()
    hub.requests.clear()
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert (tmp_path / "out" / NAME).read_bytes() == expected
    (resumed,) = [
        r for r in ranges(hub.requests, "model-00006-of-000012.safetensors") if r is None or r[1] - r[0] > 50_000
    ]
    assert resumed is not None and resumed[0] > 0
    assert None not in ranges(hub.requests, "model-00002-of-000012.safetensors")


def test_an_interrupt_ends_a_download_at_once(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    hub.store.add_folder(REPO, checkpoint)
    hub.fault("/cdn/.*00003-of", "slow", rate=50_000, skip=2)
    flags = ("convert", REPO, "--quant", "MXFP4", "--outdir", tmp_path / "out")
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path)
    wait_for(lambda: any(p.stat().st_size for p in (tmp_path / "out").glob("*/*00003*.part")))
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=30)
    assert client.returncode == 130
    assert err.endswith("error: interrupted\n  the same command continues where it stopped\n")
    assert [p.name[:11] for p in (tmp_path / "out").glob("*/*.part")] == ["model-00003"]


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for server in running:
        server.kill()
        server.wait()


def test_kill_of_the_server_and_the_command_goes_on(
    checkpoint: Path, expected: bytes, tmp_path: Path, servers: list[subprocess.Popen[str]]
) -> None:
    HubStore(tmp_path / "hub").add_folder(REPO, checkpoint)
    port = free_port()

    def serve(*faults: dict[str, Any]) -> None:
        servers.append(start_server(tmp_path / "hub", port, faults))

    serve({"match": "/cdn/.*00003-of", "kind": "slow", "rate": 200_000, "skip": 2})
    flags = ("convert", REPO, "--quant", "MXFP4", "--outdir", tmp_path / "out")
    client = start_client(*flags, endpoint=f"http://127.0.0.1:{port}", cwd=tmp_path)
    wait_for(lambda: any(p.stat().st_size for p in (tmp_path / "out").glob("*/*00003*.part")))
    servers[0].kill()
    servers[0].wait()
    serve()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert "next try in" in err
    assert (tmp_path / "out" / NAME).read_bytes() == expected
