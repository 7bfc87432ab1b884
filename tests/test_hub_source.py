"""A checkpoint on the Hub: what is asked for and when, what is on disk and for how long, and every fault on the way."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hub_api import SIGNATURE
from hub_samples import REPO, SHARD_BYTES, ranges, write_folder
from hub_server import TOKEN, HubServer
from huggingface_hub import constants, snapshot_download

from kimi_gguf import inspect
from kimi_gguf.hub import retry, shard_store, transport
from kimi_gguf.hub.address import HubAddress
from kimi_gguf.hub.cache import open_cached_source
from kimi_gguf.hub.retry import Stopped
from kimi_gguf.hub.source import HubSource, open_hub_source
from kimi_gguf.sources import resolve_source
from kimi_gguf.verify.models import open_model
from quant.errors import InputError, OutputError, UsageError

FIRST = "model-00001-of-00003.safetensors"
Open = Callable[..., HubSource]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(transport, "TRIES", 4)
    monkeypatch.setattr(transport, "PATIENT_TRIES", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "folder")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def opened(hub: HubServer, folder: Path, tmp_path: Path, notes: list[str]) -> Iterator[Open]:
    """Opens the repository; closes what was opened."""
    hub.store.add_folder(REPO, folder)
    made: list[HubSource] = []

    def open_it(revision: str | None = None, **how: Any) -> HubSource:
        how = {"download_dir": tmp_path / "shards", "note": notes.append} | how
        made.append(open_hub_source(HubAddress(REPO, revision), **how))
        return made[-1]

    yield open_it
    for source in made:
        source.close()


def content(source: HubSource, shard: int) -> bytes:
    data = bytearray(source.shards[shard].nbytes)
    source.read_into(shard, 0, memoryview(data))
    return bytes(data)


def stored(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name != shard_store.MARKER) if directory.exists() else []


def test_opening_reads_headers_by_exact_ranges_and_stores_nothing(
    hub: HubServer, opened: Open, folder: Path, tmp_path: Path
) -> None:
    source = opened()
    header = 8 + int.from_bytes((folder / FIRST).read_bytes()[:8], "little")
    assert ranges(hub.requests, FIRST) == [(0, 64), (8, header)]
    assert source.tensors["t1"].end - source.tensors["t1"].begin == SHARD_BYTES
    assert source.read_file("config.json") == (folder / "config.json").read_bytes()
    assert source.read_file("tiktoken.model") is None
    assert (source.label, source.revision) == ("Kimi-Tiny", hub.store.resolve(REPO, "main")[0])
    assert source.origin == f"hf://{REPO}@{source.revision}"
    assert not (tmp_path / "shards").exists()


def test_a_shard_is_there_from_acquire_to_release(opened: Open, folder: Path, tmp_path: Path) -> None:
    fetched: list[int] = []
    source = opened(fetched=fetched.append)
    source.acquire(0)
    assert stored(tmp_path / "shards") == [FIRST]
    assert content(source, 0) == (folder / FIRST).read_bytes()
    assert sum(fetched) == source.shards[0].nbytes
    source.release(0)
    assert stored(tmp_path / "shards") == []
    source.close()
    assert not (tmp_path / "shards").exists()


def test_a_shard_that_is_in_work_when_a_run_is_interrupted_is_not_fetched_again(
    hub: HubServer, opened: Open, tmp_path: Path
) -> None:
    source = opened()
    source.acquire(0)
    source.acquire(1)
    source.release(0)
    source.close()
    assert len(stored(tmp_path / "shards")) == 1
    again = opened()
    hub.requests.clear()
    again.acquire(1)
    assert ranges(hub.requests, again.repository.files[again.shards[1].name].path) == []
    again.release(1)
    again.close()
    assert not (tmp_path / "shards").exists()


def test_a_range_of_a_shard_that_is_not_there_is_read_from_the_hub(
    hub: HubServer, opened: Open, folder: Path, tmp_path: Path
) -> None:
    source = opened()
    hub.requests.clear()
    part = bytearray(100)
    source.read_into(1, 5000, memoryview(part))
    name = source.shards[1].name
    assert bytes(part) == (folder / name).read_bytes()[5000:5100]
    assert ranges(hub.requests, name) == [(5000, 5100)]
    assert not (tmp_path / "shards").exists()
    with pytest.raises(InputError, match="were asked for"):
        source.read_into(1, SHARD_BYTES, memoryview(bytearray(SHARD_BYTES)))


PASSING = {
    "connection dropped": {"kind": "drop"},
    "answer cut": {"kind": "cut", "at": 70_000},
    "429": {"kind": "status", "status": 429},
    "500": {"kind": "status", "status": 500},
    "503": {"kind": "status", "status": 503},
    "504": {"kind": "status", "status": 504},
    "expired signature": {"kind": "status", "status": 403},
    "answer of fewer bytes": {"kind": "short", "at": 1000},
    "range ignored": {"kind": "whole"},
    "slow link": {"kind": "slow", "rate": 4_000_000},
    "wrong byte": {"kind": "flip", "at": 123_456},
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_faults_that_pass_leave_no_trace(hub: HubServer, opened: Open, folder: Path, fault: dict[str, Any]) -> None:
    source = opened()
    hub.fault(f"/cdn/.*{FIRST}", times=2, **fault)
    source.acquire(0)
    assert content(source, 0) == (folder / FIRST).read_bytes()


@pytest.mark.parametrize("request_", ["/api/models/", "/resolve/.*config", "/resolve/.*safetensors", "/cdn/"])
def test_opening_survives_faults_too(hub: HubServer, opened: Open, request_: str) -> None:
    hub.fault(f"GET .*{request_}", "status", status=503)
    hub.fault(f"GET .*{request_}", "drop")
    assert opened().read_file("config.json")


def test_a_broken_download_continues_where_it_broke(hub: HubServer, opened: Open) -> None:
    source = opened()
    hub.requests.clear()
    hub.fault(f"/cdn/.*{FIRST}", "cut", at=1 << 17)
    source.acquire(0)
    size = source.shards[0].nbytes
    assert ranges(hub.requests, FIRST) == [None, (1 << 17, size)]


def test_a_large_shard_comes_in_segments_and_breaks_cost_only_what_they_cut(
    hub: HubServer, opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SEGMENT_BYTES", 50_000)
    monkeypatch.setattr(transport, "CONNECTIONS", 3)
    source = opened()
    size = source.shards[0].nbytes
    hub.requests.clear()
    hub.fault(f"/cdn/.*{FIRST}", "cut", at=10_000, skip=2)
    hub.fault(f"/cdn/.*{FIRST}", "drop", skip=4)
    source.acquire(0)
    assert content(source, 0) == (folder / FIRST).read_bytes()
    asked = sorted(r for r in ranges(hub.requests, FIRST) if r)
    assert sum(end - begin for begin, end in asked) <= size + 40_000 + 50_000
    assert {(at, min(at + 50_000, size)) for at in range(0, size, 50_000)} <= set(asked)


def test_a_segment_that_cannot_be_had_ends_the_download(
    hub: HubServer, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SEGMENT_BYTES", 50_000)
    source = opened()
    hub.fault(f"/cdn/.*{FIRST}", "status", status=404, skip=3, times=99)
    with pytest.raises(InputError, match="the Hub answers 404"):
        source.acquire(0)
    (part,) = (tmp_path / "shards").glob("*.part")
    assert part.stat().st_size in (0, 50_000, 100_000, 150_000)


def test_half_a_shard_of_an_earlier_run_is_continued(
    hub: HubServer, opened: Open, folder: Path, tmp_path: Path
) -> None:
    source = opened()
    file = source.repository.files[FIRST]
    (tmp_path / "shards").mkdir()
    source.store.part(file).write_bytes((folder / FIRST).read_bytes()[:100_000])
    (tmp_path / "shards" / shard_store.MARKER).write_text("{}")
    stale = tmp_path / "shards" / f"{FIRST}.0123456789ab.part"
    stale.write_bytes(b"of another commit")
    hub.requests.clear()
    source.acquire(0)
    assert ranges(hub.requests, FIRST) == [(100_000, file.nbytes)]
    assert content(source, 0) == (folder / FIRST).read_bytes()
    assert not stale.exists()


@pytest.mark.parametrize("what", ["half", "whole"])
def test_damaged_leftovers_are_fetched_again(
    hub: HubServer, opened: Open, folder: Path, tmp_path: Path, what: str
) -> None:
    source = opened()
    file = source.repository.files[FIRST]
    damaged = bytearray((folder / FIRST).read_bytes())
    damaged[1000] ^= 1
    source.store.open()
    if what == "half":
        source.store.part(file).write_bytes(damaged[:50_000])
    else:
        source.store.path(file).write_bytes(damaged)
    source.acquire(0)
    assert content(source, 0) == (folder / FIRST).read_bytes()


def test_bytes_that_stay_wrong_are_refused_with_both_hashes(hub: HubServer, opened: Open, tmp_path: Path) -> None:
    source = opened()
    hub.fault(f"/cdn/.*{FIRST}", "flip", at=123_456, times=99)
    with pytest.raises(InputError, match="wrong hash") as caught:
        source.acquire(0)
    assert source.repository.files[FIRST].hash in str(caught.value)
    assert stored(tmp_path / "shards") == []
    hub.faults.clear()
    hub.fault("/resolve/.*config.json", "flip", at=3, times=99)
    with pytest.raises(InputError, match=r"config\.json: came 3 times with the wrong hash"):
        source.read_file("config.json")


def test_a_wrong_header_at_planning_is_found_when_the_shard_is_there(
    hub: HubServer, opened: Open, folder: Path
) -> None:
    at = (folder / FIRST).read_bytes().index(b'"t1"') + 1
    hub.fault(f"/cdn/.*{FIRST}", "flip", at=at, times=9)
    source = opened()
    hub.faults.clear()
    assert "t1" not in source.tensors
    with pytest.raises(InputError, match="the plan was made from one with"):
        source.acquire(0)


def test_a_fault_that_stays_ends_with_its_reason(hub: HubServer, opened: Open, notes: list[str]) -> None:
    source = opened()
    hub.fault(f"/cdn/.*{FIRST}", "status", status=500, times=99)
    with pytest.raises(InputError, match=f"{FIRST}: failed 4 times in a row, at last: localhost answers 500"):
        source.acquire(0)
    assert len(notes) == 3


def test_the_wait_that_the_hub_asks_for_is_kept(
    hub: HubServer, opened: Open, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened()
    waits: list[float] = []
    monkeypatch.setattr(source.repository.transport.stop, "wait", lambda seconds: waits.append(seconds))
    hub.fault(f"/cdn/.*{FIRST}", "status", status=429, headers={"Retry-After": "31"})
    hub.fault(f"/cdn/.*{FIRST}", "status", status=503, headers={"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"})
    with pytest.raises(InputError, match="the Hub asks to wait"):
        source.acquire(0)
    assert waits == [31.0]
    assert "next try in 31 s" in notes[0]
    assert retry.asked_wait({"ratelimit": '"api";r=0;t=55'}) == 55
    assert retry.asked_wait({"Retry-After": "soon"}) is None


def test_silence_is_a_timeout(hub: HubServer, opened: Open, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    source = opened()
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.fault(f"/cdn/.*{FIRST}", "hang", seconds=0.5)
    source.acquire(0)
    assert "read timeout" in notes[0]


def test_no_hub_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="failed 3 times in a row, at last: connect error"):
        open_hub_source(HubAddress(REPO), download_dir=tmp_path / "shards")


def test_a_full_disk_is_said_plainly_and_what_came_stays(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened()
    write = shard_store._write

    def full(out: FileIO, data: bytes) -> None:
        if out.tell() > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(out, data[:60_000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_store, "_write", full)
    with pytest.raises(OutputError, match="the disk is full"):
        source.acquire(0)
    (part,) = (tmp_path / "shards").glob("*.part")
    assert part.stat().st_size == 60_000


def test_a_moved_branch_does_not_disturb_a_source_that_is_open(hub: HubServer, opened: Open, folder: Path) -> None:
    source = opened()
    hub.store.commit(REPO, "main", "other shards", {FIRST: hub.store.entry(FIRST, hub.store.put(b"other"))})
    source.acquire(0)
    assert content(source, 0) == (folder / FIRST).read_bytes()
    assert opened(source.revision).stamp(0) == source.stamp(0)


def test_close_calls_off_a_download_and_keeps_what_came(hub: HubServer, opened: Open, tmp_path: Path) -> None:
    source = opened(fetched=lambda nbytes: source.repository.transport.stop.set())
    hub.fault(f"/cdn/.*{FIRST}", "slow", rate=1_000_000)
    with pytest.raises(Stopped):
        source.acquire(0)
    source.close()
    (part,) = stored(tmp_path / "shards")
    assert part.startswith(FIRST) and part.endswith(".part")


REFUSALS = {
    "no such repository": ("org/absent", None, "404: Repository not found", "check the name"),
    "private": ("org/private", None, "401: Repository not found", "HF_TOKEN"),
    "gated": ("org/gated", None, "401: Access to model org/gated is restricted", "ask for access"),
    "no such revision": (REPO, "v9", "404: Invalid rev id: v9", "/commits"),
}


@pytest.mark.parametrize(("repo", "revision", "reason", "hint"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_carry_the_hubs_reason_in_one_line(
    hub: HubServer, folder: Path, tmp_path: Path, repo: str, revision: str | None, reason: str, hint: str
) -> None:
    hub.store.add_folder(REPO, folder)
    hub.store.add_folder("org/private", folder, private=True)
    hub.store.add_folder("org/gated", folder, gated=True)
    with pytest.raises(InputError) as caught:
        open_hub_source(HubAddress(repo, revision), download_dir=tmp_path / "shards")
    assert reason in caught.value.message and "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_token_opens_what_is_private_and_stays_with_the_hub(
    hub: HubServer, folder: Path, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.store.add_folder("org/private", folder, private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    source = open_hub_source(HubAddress("org/private"), download_dir=tmp_path / "shards", note=notes.append)
    message = f"see http://localhost/cdn/x?{SIGNATURE} with {TOKEN}"
    hub.fault(f"/cdn/.*{FIRST}", "drop")
    hub.fault(f"/cdn/.*{FIRST}", "status", status=404, headers={"X-Error-Message": message}, times=9)
    with pytest.raises(InputError) as caught:
        source.acquire(0)
    source.close()
    assert {r.authorization for r in hub.requests if r.host.startswith("127.")} == {f"Bearer {TOKEN}"}
    assert {r.authorization for r in hub.requests if r.host.startswith("localhost")} == {None}
    assert "see http://localhost/cdn/x with ***" in str(caught.value)
    said = "\n".join([*notes, str(caught.value), source.origin])
    assert TOKEN not in said and SIGNATURE.partition("=")[2] not in said


def test_max_disk_below_the_need_and_foreign_folders_are_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    source = opened(download_dir=tmp_path / "full")
    with pytest.raises(UsageError, match="holds other files"):
        source.acquire(0)
    with pytest.raises(UsageError, match="is not a size"):
        opened(max_disk="200X")


def test_a_folder_of_shards_belongs_to_one_process_and_one_repository(
    hub: HubServer, opened: Open, folder: Path, tmp_path: Path
) -> None:
    opened().acquire(0)
    with pytest.raises(OutputError, match="another process fetches shards into"):
        opened().acquire(0)
    other = tmp_path / "other"
    other.mkdir()
    (other / shard_store.MARKER).write_text('{"repo": "org/Other"}')
    with pytest.raises(UsageError, match="holds shards of org/Other"):
        opened(download_dir=other).acquire(0)
    descriptor = os.open(other / shard_store.MARKER, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_shards_that_are_kept_stay_and_are_not_fetched_again(hub: HubServer, opened: Open, tmp_path: Path) -> None:
    source = opened(keep_shards=True)
    source.acquire(0)
    source.release(0)
    source.close()
    assert stored(tmp_path / "shards") == [FIRST]
    hub.requests.clear()
    again = opened()
    assert again.store.keep
    hub.requests.clear()
    again.acquire(0)
    again.release(0)
    again.finished()
    assert ranges(hub.requests, FIRST) == []
    assert stored(tmp_path / "shards") == [FIRST]


def test_the_next_shard_waits_for_room(opened: Open) -> None:
    source = opened()
    size = source.shards[0].nbytes
    source.budget.limit = 2 * size
    source.acquire(0)
    source.acquire(1)
    assert source.budget.used == 2 * size
    source.repository.transport.stop.set()
    with pytest.raises(Stopped):
        source.acquire(2)
    source.release(0)
    assert source.budget.used == size


def cache_listing() -> list[tuple[str, int]]:
    root = Path(constants.HF_HUB_CACHE)
    return sorted((str(p), p.lstat().st_mtime_ns) for p in root.rglob("*"))


def test_a_snapshot_in_the_cache_is_used_and_never_written(
    hub: HubServer, opened: Open, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()
    snapshot_download(REPO)
    before = cache_listing()
    hub.requests.clear()
    source = opened()
    for shard in range(3):
        source.acquire(shard)
        assert content(source, shard) == (folder / source.shards[shard].name).read_bytes()
        source.release(shard)
    assert [r for r in hub.requests if "/resolve/" in r.path or "/cdn/" in r.path] == []
    assert not (tmp_path / "shards").exists()
    assert cache_listing() == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    offline = resolve_source(REPO)
    assert offline.origin == source.origin
    assert [offline.stamp(n) for n in range(3)] == [source.stamp(n) for n in range(3)]
    assert list(offline.shards) == list(source.shards)
    assert hub.requests == []
    assert cache_listing() == before


def test_offline_mode_names_the_way_out(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"hf://org/Never is not in the local cache, and offline mode is on"):
        open_cached_source(HubAddress("org/Never"))
    with pytest.raises(InputError, match="offline mode is on"):
        open_hub_source(HubAddress("org/Never"), download_dir=tmp_path)
    assert hub.requests == []


def test_a_mistyped_path_fails_soon_when_the_hub_cannot_be_reached(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.002)
    # Nobody listens at this port, as the server is not running.
    notes: list[str] = []
    with pytest.raises(InputError, match=r"no local folder ck/none, and the Hub cannot be reached .*onnect") as caught:
        resolve_source("ck/none", note=notes.append)
    assert len(notes) == 2 and "check the path" in (caught.value.hint or "")
    with pytest.raises(InputError, match="failed 3 times in a row"):
        resolve_source("hf://ck/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"no local folder ck/none; .* offline mode is on"):
        resolve_source("ck/none")


@pytest.mark.parametrize(
    ("name", "fetch"),
    [
        ("org/Kimi@main", "hf download org/Kimi --local-dir FOLDER"),
        ("hf://org/Kimi/Q3_K_M", "hf download org/Kimi --include 'Q3_K_M*' --local-dir FOLDER"),
        ("https://huggingface.co/org/Kimi", "hf download org/Kimi --local-dir FOLDER"),
    ],
)
def test_verbs_that_take_local_paths_only_say_so_of_a_repository(name: str, fetch: str) -> None:
    with pytest.raises(UsageError, match="reads local files only, not the Hub") as caught:
        open_model(Path(name))
    assert fetch in (caught.value.hint or "") and name in caught.value.message
    with pytest.raises(UsageError) as caught:
        open_model(Path("some/where/model.gguf"))
    assert "Hub" not in caught.value.message
    with pytest.raises(InputError) as unreadable:
        inspect("org/Kimi")
    assert "write hf://org/Kimi" in (unreadable.value.hint or "")


def test_a_path_that_exists_wins_over_a_repository(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / REPO)
    monkeypatch.chdir(tmp_path)
    assert resolve_source(REPO).origin == str(tmp_path / REPO)
    with pytest.raises(
        InputError,
        match=r"neither a local folder nor a repository on the Hub is named org/Other: .* answers 404",
    ):
        resolve_source("org/Other")
    with pytest.raises(UsageError, match="there is no folder plain-name"):
        resolve_source("plain-name")
    with pytest.raises(UsageError, match="not a checkpoint"):
        resolve_source(f"hf://{REPO}/config.json")
