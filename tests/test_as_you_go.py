"""Conversions that publish each file and remove it: disk, resume from anywhere, and what ends them."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from hub_environment import ENDPOINT
from hub_samples import on_disk, start_client, wait_for
from hub_server import TOKEN, HubServer
from hub_store import sha256_of

from convert.domain import Plan
from kimi_gguf import convert, publish_model
from kimi_gguf.hub import retry
from kimi_gguf.publish.lock import upload_lock
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import InputError, OutputError, UsageError

SOURCE = "org/Kimi-Tiny"
REPO = "tester/Kimi-GGUF"
SPLIT = 900_000
FLAGS = {"quant": "MXFP4", "split_max_size": SPLIT, "threads": 2}
STEM = "Kimi-K3.1-Pro-MXFP4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 shards; read only."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "Kimi", TinyShape(layers=5, experts=6))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SHA-256 by name of what the local conversion gives."""
    result = convert(checkpoint, outdir=tmp_path_factory.mktemp("expected"), **FLAGS)
    assert len(result.files) > 5
    return {path.name: sha256_of(path) for path in result.files}


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("KIMI_GGUF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.002)


def published(hub: HubServer) -> dict[str, str]:
    files = hub.store.resolve(REPO, "main")[1]
    return {p.removeprefix("MXFP4/"): e["object"] for p, e in files.items() if p.endswith(".gguf")}


def manifest_of(hub: HubServer) -> dict[str, Any]:
    entry = hub.store.resolve(REPO, "main")[1][f"MXFP4/{STEM}.gguf.manifest.json"]
    found: dict[str, Any] = json.loads(hub.store.object(entry["object"]).read_text())
    return found


def as_you_go(src: Path | str, outdir: Path, **flags: Any) -> Any:
    return convert(src, outdir=outdir, publish=REPO, as_you_go=True, create=True, **(FLAGS | flags))


def test_the_job_runs_on_little_disk_and_the_server_holds_the_same_bytes(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.store.add_folder(SOURCE, checkpoint)
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="--max-disk 1,000 is less than") as caught:
        as_you_go(SOURCE, out, max_disk=1000)
    limit = int(caught.value.message.split("than the ")[1].split(" bytes")[0].replace(",", ""))
    plans: list[Plan] = []
    peak = 0

    def fetched(nbytes: int) -> None:
        nonlocal peak
        peak = max(peak, on_disk(out, out / "Kimi-Tiny.shards"))

    result = as_you_go(SOURCE, out, max_disk=limit, fetched=fetched, on_plan=plans.append)
    assert published(hub) == expected
    assert 0 < peak <= limit < plans[0].nbytes
    assert [p.name for p in out.iterdir()] == [f"{STEM}.gguf.manifest.json"]
    assert result.files == () and result.notes == (f"published: hf://{REPO}@main",)
    manifest = manifest_of(hub)
    assert manifest["complete"] and {f["name"]: f["sha256"] for f in manifest["files"]} == expected
    assert (
        "| [MXFP4](./MXFP4)" in hub.store.object(hub.store.resolve(REPO, "main")[1]["README.md"]["object"]).read_text()
    )
    with pytest.raises(OutputError, match="--max-disk"):
        as_you_go(SOURCE, out, max_disk=limit - 1)


def test_a_checkpoint_on_disk_publishes_as_it_goes_too(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="output that is not yet published") as caught:
        as_you_go(checkpoint, tmp_path / "out", max_disk=1000)
    limit = int(caught.value.message.split("than the ")[1].split(" bytes")[0].replace(",", ""))
    as_you_go(checkpoint, tmp_path / "out", max_disk=limit)
    assert published(hub) == expected
    history = len(hub.store.history(REPO, "main"))
    as_you_go(checkpoint, tmp_path / "again", max_disk=limit)
    assert len(hub.store.history(REPO, "main")) == history


def test_killed_ten_times_and_moved_to_another_machine_the_hashes_are_the_same(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.store.add_folder(SOURCE, checkpoint)
    flags = ("convert", SOURCE, "--quant", "MXFP4", "--split-max-size", SPLIT, "--threads", 1)
    flags = (*flags, "--publish", REPO, "--as-you-go", "--create")
    # Shards first: what a machine has made of them is not fetched again.
    moments = [
        "GET /cdn/.*safetensors",
        "PUT /upload/",
        "POST .*/commit/",
        "POST .*/objects/batch",
        "POST .*/preupload/",
    ]
    kills = 0
    for number in range(10):
        # Two machines: what one has done and not published, the other does not know.
        folder = tmp_path / f"machine{number // 5}"
        folder.mkdir(exist_ok=True)
        hub.faults.clear()
        kind = moments[number % 5]
        hang = hub.fault(kind, "hang", seconds=30, skip=16 if "cdn" in kind else number % 2)
        client = start_client(*flags, "--outdir", folder / "out", endpoint=ENDPOINT, cwd=folder, token=TOKEN)
        wait_for(lambda c=client, f=hang: f.times == 0 or c.poll() is not None)
        kills += client.poll() is None
        client.send_signal(signal.SIGKILL)
        client.communicate()
    assert kills == 10
    hub.faults.clear()
    client = start_client(*flags, "--outdir", folder / "out", endpoint=ENDPOINT, cwd=folder, token=TOKEN)
    out, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert published(hub) == expected
    assert manifest_of(hub)["complete"] and TOKEN not in out + err + json.dumps(manifest_of(hub))
    assert not list((folder / "out").glob("*.gguf*journal")) and not list((folder / "out").glob("*.gguf"))


def test_an_interrupt_does_not_wait_for_an_upload(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    hang = hub.fault("PUT /upload/", "hang", seconds=30, skip=1)
    flags = ("convert", checkpoint, "--quant", "MXFP4", "--split-max-size", SPLIT, "--outdir", tmp_path / "out")
    flags = (*flags, "--publish", REPO, "--as-you-go", "--create")
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
    wait_for(lambda: hang.times == 0)
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=25)
    assert client.returncode == 130, err
    assert err.endswith("error: interrupted\n  the same command continues where it stopped\n")
    with upload_lock(REPO, "main"):
        pass


class Off(Exception):
    pass


def broken_off(hub: HubServer, src: Path | str, outdir: Path, files: int) -> None:
    """A run that ends after some files have been published."""

    def note(text: str) -> None:
        nonlocal files
        files -= "published and removed" in text
        if not files:
            raise Off

    with pytest.raises(Off):
        as_you_go(src, outdir, note=note)


def test_another_machine_makes_only_what_the_hub_does_not_hold(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    broken_off(hub, checkpoint, tmp_path / "one", 3)
    held = published(hub)
    assert 3 <= len(held) < len(expected)
    assert not manifest_of(hub)["complete"]
    notes: list[str] = []
    as_you_go(checkpoint, tmp_path / "two", note=notes.append)
    assert published(hub) == expected
    assert sum("published and removed" in note for note in notes) == len(expected) - len(held)
    # And the first machine finds nothing to do.
    as_you_go(checkpoint, tmp_path / "one")
    assert [p.name for p in (tmp_path / "one").iterdir()] == [f"{STEM}.gguf.manifest.json"]


def test_what_a_run_without_publishing_left_is_published_and_removed(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    done = 0

    def stop(path: Path) -> None:
        nonlocal done
        done += 1
        if done == 3:
            raise Off

    with pytest.raises(Off):
        convert(checkpoint, outdir=tmp_path, on_file_done=stop, **FLAGS)
    assert len(list(tmp_path.glob("*.gguf"))) >= 3
    as_you_go(checkpoint, tmp_path)
    assert published(hub) == expected and not list(tmp_path.glob("*.gguf"))


def test_a_published_file_that_vanished_is_made_again(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    as_you_go(checkpoint, tmp_path / "out")
    name = sorted(expected)[2]
    hub.store.commit(REPO, "main", "gone", {}, (f"MXFP4/{name}",))
    as_you_go(checkpoint, tmp_path / "out")
    assert published(hub) == expected


def test_another_conversion_in_the_same_place_is_refused(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    broken_off(hub, checkpoint, tmp_path / "one", 2)
    with pytest.raises(OutputError, match="holds files of another conversion"):
        as_you_go(checkpoint, tmp_path / "two", tensor_type=["output=Q8_0"])
    with pytest.raises(OutputError, match="holds another MXFP4 already"):
        as_you_go(checkpoint, tmp_path / "two", name="Other")
    as_you_go(checkpoint, tmp_path / "three", split_max_size="2M", overwrite=True)
    assert len(published(hub)) < len(expected) and manifest_of(hub)["complete"]
    with pytest.raises(UsageError, match="does not end in -MXFP4"):
        convert(checkpoint, quant="MXFP4", outfile=tmp_path / "m.gguf", publish=REPO, as_you_go=True)
    with pytest.raises(UsageError, match="give --publish"):
        convert(checkpoint, quant="MXFP4", outdir=tmp_path, as_you_go=True)


def test_a_wrong_hash_keeps_the_file_and_ends_the_conversion(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = hub.store.entry
    wrong = hub.store.put(b"other bytes")

    def entry(path: str, name: str, *, large: bool | None = None) -> dict[str, Any]:
        found = right(path, name, large=large)
        return found | {"object": wrong} if "-00002-of-" in path else found

    monkeypatch.setattr(hub.store, "entry", entry)
    with pytest.raises(InputError, match=f"the Hub holds {wrong}"):
        as_you_go(checkpoint, tmp_path / "out")
    second = sorted(expected)[1]
    assert sha256_of(tmp_path / "out" / second) == expected[second]
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    as_you_go(checkpoint, tmp_path / "out")
    assert published(hub) == expected


def test_while_publishing_stalls_no_room_is_taken_and_its_end_is_the_conversions(
    hub: HubServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.store.add_folder(SOURCE, checkpoint)
    monkeypatch.setattr("kimi_gguf.publish.target.PATIENT_TRIES", 3)
    hub.fault("POST .*/preupload/", "status", status=403, skip=2, times=99)
    with pytest.raises(InputError, match="the Hub answers 403"):
        as_you_go(SOURCE, tmp_path / "out", max_disk=7_000_000)


def test_without_as_you_go_the_files_stay_and_are_published_at_the_end(
    hub: HubServer, checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="Repository not found"):
        convert(checkpoint, outdir=tmp_path / "out", publish=REPO, **FLAGS)
    assert not (tmp_path / "out").exists()
    result = convert(checkpoint, outdir=tmp_path / "out", publish=REPO, create=True, **FLAGS)
    assert published(hub) == expected and len(result.files) == len(expected)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert publish_model(tmp_path / "copy", REPO).upload_bytes == 0
