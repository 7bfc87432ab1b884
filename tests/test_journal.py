"""The journal: what it says survives a crash at any byte, and only one process holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convert.journal import FileRecord, Journal, JournalHeader, open_journal
from quant.errors import InputError, OutputError

HEADER = JournalHeader("d" * 64, {"--quant": "Q4_K_M"}, ["a.gguf"], 10, {"shard-1": "5-1", "shard-2": "6-1"})


def reopened(path: Path, header: JournalHeader = HEADER, overwrite: bool = False) -> Journal:
    return open_journal(path, header, overwrite=overwrite)


def written(path: Path) -> None:
    journal = reopened(path)
    for unit in (3, 1, 4):
        journal.record(unit, 1000 + unit)
    journal.flush(lambda: None)
    journal.record(5, 1005)
    journal.flush(lambda: None)
    journal.record_file(0, FileRecord("f" * 64, ("a" * 64, "b" * 64)))
    journal.close()


def test_units_and_files_are_found_again(tmp_path: Path) -> None:
    written(tmp_path / "a.gguf.journal")
    journal = reopened(tmp_path / "a.gguf.journal")
    assert list(journal.checksums) == [-1, 1001, -1, 1003, 1004, 1005, -1, -1, -1, -1]
    assert journal.files == {0: FileRecord("f" * 64, ("a" * 64, "b" * 64))}
    journal.close()


def test_data_is_synced_before_it_is_journalled(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    journal = reopened(path)
    journal.record(7, 1)
    sizes = []
    journal.flush(lambda: sizes.append(path.stat().st_size))
    assert sizes[0] < path.stat().st_size
    journal.close()


def test_a_failed_sync_journals_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    journal = reopened(path)
    journal.record(7, 1)
    before = path.stat().st_size

    def fail() -> None:
        raise OutputError("disk full")

    with pytest.raises(OutputError):
        journal.flush(fail)
    assert path.stat().st_size == before
    journal.close()


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_torn_tail_costs_only_the_last_record(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.gguf.journal"
    written(path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for size in range(len(data) - len(lines[-1]), len(data)):
        path.write_bytes(data[:size] + (b"" if damage == "cut" else b"\0" * (len(data) - size)))
        journal = reopened(path)
        assert list(journal.checksums)[5] == 1005
        assert journal.files == {}
        journal.close()
        assert len(path.read_bytes().splitlines()) == len(lines)


def test_a_journal_cut_inside_its_header_is_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    written(path)
    path.write_bytes(path.read_bytes()[:30])
    journal = reopened(path)
    assert set(journal.checksums) == {-1}
    journal.close()


def test_units_can_be_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    written(path)
    journal = reopened(path)
    journal.forget([3, 5], [0])
    journal.close()
    journal = reopened(path)
    assert list(journal.checksums)[:6] == [-1, 1001, -1, -1, 1004, -1]
    assert journal.files == {}
    journal.close()


def test_another_plan_is_refused_with_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    written(path)
    other = replace(HEADER, digest="e" * 64, settings={"--quant": "Q8_0"})
    with pytest.raises(OutputError, match=r"--quant was Q4_K_M, is now Q8_0\n.*--overwrite"):
        reopened(path, other)
    journal = reopened(path, other, overwrite=True)
    assert journal.discarded == HEADER and set(journal.checksums) == {-1}
    journal.close()


def test_changed_shards_are_refused_or_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    written(path)
    other = replace(HEADER, stamps={"shard-1": "5-1", "shard-2": "6-2"})
    with pytest.raises(InputError, match=r"1 shards have changed .*; the first is shard-2\n.*--overwrite"):
        reopened(path, other)
    journal = reopened(path, other, overwrite=True)
    assert journal.changed == ("shard-2",) and journal.checksums[3] == 1003
    journal.close()
    journal = reopened(path, other)
    assert journal.changed == ()
    journal.close()


def test_a_second_process_stops_and_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    journal = reopened(path)
    code = (
        "import sys; from pathlib import Path; from convert.journal import *;"
        f"open_journal(Path({str(path)!r}), JournalHeader('d'*64, {{}}, [], 10, {{}}), overwrite=True)"
    )
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"another process ({os.getpid()}) is writing this output: {tmp_path}/a.gguf" in second.stderr
    journal.close()
    third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert third.returncode == 0, third.stderr


def test_removing_gives_the_name_free(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf.journal"
    journal = reopened(path)
    journal.remove()
    assert not path.exists()
    reopened(path).close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_journal(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.gguf.journal")
    with pytest.raises(OutputError, match=r"a\.gguf\.journal"):
        reopened(tmp_path / "a.gguf.journal")
