"""Checkpoints in folders: which files count, what is checked before any work, how bytes are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_samples import entry, shard_bytes, write_shard_file

from convert.source import LocalSource, open_source
from convert.source_files import INDEX
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import InputError

ONE, TWO = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with one tensor each, and their index."""
    directory = tmp_path / "Kimi-Test"
    directory.mkdir()
    write_shard_file(directory / ONE, {"a": ("U8", [4, 8], 32)})
    write_shard_file(directory / TWO, {"b": ("F32", [3], 12)})
    write_index(directory, {"a": ONE, "b": TWO})
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 44}, "weight_map": weight_map}))


def refused(directory: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        open_source(directory)
    return caught.value


def test_a_folder_gives_its_tensors_shards_and_its_own_name(folder: Path):
    source = open_source(folder)
    assert [s.name for s in source.shards] == [ONE, TWO]
    assert {n: (t.dtype, t.shape, t.shard) for n, t in source.tensors.items()} == {
        "a": ("U8", (4, 8), 0),
        "b": ("F32", (3,), 1),
    }
    assert (source.label, source.revision, list(source.warnings)) == ("Kimi-Test", None, [])
    assert all(len(s.header_sha256) == 64 and s.nbytes == (folder / s.name).stat().st_size for s in source.shards)


def test_an_index_is_not_needed(folder: Path):
    (folder / INDEX).unlink()
    assert list(open_source(folder).tensors) == ["a", "b"]


def test_a_single_file_is_a_checkpoint(folder: Path):
    for name in (INDEX, TWO):
        (folder / name).unlink()
    (folder / ONE).rename(folder / "model.safetensors")
    assert list(open_source(folder).tensors) == ["a"]


def test_bytes_are_read_into_any_buffer_and_after_release(folder: Path):
    content = (folder / ONE).read_bytes()
    with open_source(folder) as source:
        for _ in range(2):
            buffer = bytearray(10)
            source.acquire(0)
            source.read_into(0, 5, memoryview(buffer))
            assert bytes(buffer) == content[5:15]
            source.release(0)


def test_a_shard_that_shrinks_after_opening_is_an_error_that_names_both_ends(folder: Path):
    source = open_source(folder)
    size = (folder / ONE).stat().st_size
    os.truncate(folder / ONE, size - 3)
    with pytest.raises(InputError, match=f"{ONE}: ends at byte {size - 3}, expected data up to {size}"):
        source.read_into(0, size - 8, memoryview(bytearray(8)))


def test_a_stamp_changes_with_size_and_time(folder: Path):
    source = open_source(folder)
    before = source.stamp(0)
    assert before == source.stamp(0)
    os.utime(folder / ONE, ns=(1, 1))
    assert source.stamp(0) != before


def test_side_files_are_read_whole_or_are_none(folder: Path):
    (folder / "config.json").write_text("{}")
    source = open_source(folder)
    assert source.read_file("config.json") == b"{}"
    assert source.read_file("tiktoken.model") is None
    (folder / "tiktoken.model").symlink_to(folder / "gone")
    with pytest.raises(InputError, match="link to a missing file"):
        source.read_file("tiktoken.model")
    (folder / "generation_config.json").mkdir()
    with pytest.raises(InputError, match="not a regular file"):
        source.read_file("generation_config.json")


def test_a_hub_cache_snapshot_is_read_through_its_links_and_named_after_the_model(folder: Path, tmp_path: Path):
    repo = tmp_path / "models--org--Kimi-K3.1--Pro"
    snapshot, blobs = repo / "snapshots" / COMMIT, repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate((ONE, TWO, INDEX)):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    source = open_source(snapshot)
    assert (source.label, source.revision) == ("Kimi-K3.1--Pro", COMMIT)
    assert list(source.tensors) == ["a", "b"]
    assert "snapshots" in (refused(repo).hint or "")


def test_a_folder_named_after_a_commit_takes_its_name_from_the_config(folder: Path):
    (folder / "config.json").write_text('{"_name_or_path": "org/Kimi-K3-tuned"}')
    assert open_source(folder.rename(folder.parent / COMMIT)).label == "Kimi-K3-tuned"


def test_a_shard_that_the_index_names_and_the_disk_lacks_is_an_error_with_counts_and_names(folder: Path):
    write_index(folder, {"a": ONE, "b": TWO, "c": "model-00003-of-000002.safetensors", "d": "x.safetensors"})
    message = refused(folder).message
    assert "2 shards" in message and "model-00003-of-000002.safetensors" in message and "2 tensors, first c" in message


def test_a_missing_number_of_a_set_without_index_is_an_error(folder: Path):
    (folder / INDEX).unlink()
    (folder / ONE).unlink()
    assert "1 of 2 shards are not there: numbers 1" in refused(folder).message


def test_tensors_that_the_index_omits_or_misplaces_are_warned_of_and_read_from_the_headers(folder: Path):
    write_index(folder, {"a": TWO})
    source = open_source(folder)
    assert list(source.tensors) == ["a", "b"] and source.tensors["a"].shard == 0
    assert len(source.warnings) == 3
    assert "does not name 1 shards" in source.warnings[0]
    assert "places 1 tensors" in source.warnings[1] and "omits 1 tensors" in source.warnings[2]


def test_tensors_that_only_the_index_knows_are_an_error(folder: Path):
    write_index(folder, {"a": ONE, "b": TWO, "ghost": TWO})
    assert "1 tensors that no shard holds: ghost" in refused(folder).message


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "a/../../m.safetensors", "a\\b", "a\nb", "", ".."])
def test_a_shard_name_that_leaves_the_folder_is_refused(folder: Path, name: str):
    write_index(folder, {"a": ONE, "b": name})
    assert "not a plain name" in refused(folder).message


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map":[]}', '{"weight_map":{}}', '{"a":1}', '{"weight_map":{"a":1}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(folder: Path, text: str):
    (folder / INDEX).write_text(text)
    assert INDEX in refused(folder).message


def test_a_truncated_shard_is_found_on_opening(folder: Path):
    size = (folder / TWO).stat().st_size
    os.truncate(folder / TWO, size - 1)
    message = refused(folder).message
    assert TWO in message and str(size) in message and str(size - 1) in message


def test_one_tensor_in_two_shards_is_an_error_that_names_both(folder: Path):
    write_shard_file(folder / TWO, {"a": ("U8", [4, 8], 32)})
    message = refused(folder).message
    assert "tensor a" in message and ONE in message and TWO in message


def test_files_of_another_set_are_ignored_with_a_warning(folder: Path):
    (folder / "adapter_model.safetensors").write_bytes(shard_bytes({"x": entry("U8", [1], 0, 1)}, 1))
    source = open_source(folder)
    assert "x" not in source.tensors and "adapter_model.safetensors" in source.warnings[0]


def test_two_sets_without_an_index_are_refused(folder: Path):
    (folder / INDEX).unlink()
    write_shard_file(folder / "model-00001-of-000003.safetensors", {"c": ("U8", [1], 1)})
    assert "several checkpoints" in refused(folder).message


@pytest.mark.parametrize("put", [lambda p: p.symlink_to("gone"), Path.mkdir, os.mkfifo], ids=["link", "folder", "pipe"])
def test_a_shard_that_is_no_file_is_refused_at_once(folder: Path, put: Callable[[Path], None]):
    (folder / TWO).unlink()
    put(folder / TWO)
    assert "1 shards that are not there" in refused(folder).message


def test_a_pipe_in_a_set_without_index_does_not_block(folder: Path):
    (folder / INDEX).unlink()
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)
    assert "not a regular file" in refused(folder).message


def test_places_without_a_checkpoint_say_what_to_name(tmp_path: Path):
    assert "No such file" in refused(tmp_path / "none").message
    assert "no checkpoint" in refused(tmp_path).message
    (tmp_path / "file").touch()
    assert "not a folder" in refused(tmp_path / "file").message


def test_the_folder_is_never_written(folder: Path):
    def state() -> list[tuple[str, int, int]]:
        return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir())

    before = state()
    with open_source(folder) as source:
        source.read_into(0, 0, memoryview(bytearray(8)))
    assert state() == before


@pytest.mark.parametrize("sharding", ["layer", "shuffled", 300_000])
def test_any_sharding_of_a_checkpoint_holds_the_same_tensors_with_the_same_bytes(tmp_path: Path, sharding):
    shape = TinyShape(layers=2, hidden=64, experts=4, latent=32, expert_width=32, ffn_dense=64, vision=False)

    def contents(source: LocalSource) -> dict[str, bytes]:
        out = {}
        for name, tensor in source.tensors.items():
            buffer = bytearray(tensor.nbytes)
            source.read_into(tensor.shard, tensor.begin, memoryview(buffer))
            out[name] = bytes(buffer)
        return out

    usual = open_source(make_checkpoint(tmp_path / "usual", shape))
    other = open_source(make_checkpoint(tmp_path / "other", shape, sharding=sharding))
    assert contents(usual) == contents(other) and not other.warnings


MEASURE = """
import sys
from convert.source import open_source

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before = anonymous()
source = open_source(sys.argv[1])
print(len(source.tensors), anonymous() - before)
"""


@pytest.mark.slow
def test_the_tensor_table_of_the_release_stays_below_250_mb(sparse_release: Path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(sparse_release)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    count, kilobytes = map(int, done.stdout.split())
    assert count == 497_340
    assert kilobytes < 250_000


def test_a_folder_named_like_a_cache_entry_is_named_after_the_model_too(folder: Path):
    assert open_source(folder.rename(folder.parent / "models--org--Kimi-K3")).label == "Kimi-K3"


def test_a_shard_name_that_no_disk_could_hold_is_one_that_is_missing(folder: Path):
    write_index(folder, {"a": ONE, "b": "x" * 5000})
    assert "names 1 shards that are not there" in refused(folder).message
