"""A split GGUF as one file: all keys but the split keys, and every tensor's bytes as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from convert.disk import disk_faults, free_bytes
from convert.gguf_file import FileLayout, MetadataEntry, TensorEntry, lay_out
from convert.output import PARTIAL, sync_directory
from quant.errors import InputError, OutputError
from quant.gguf_cursor import StringArray
from quant.gguf_parser import GgufValue
from quant.gguf_split import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS, GgufSet

_CHUNK = 16 << 20
_STEPS = 100
# The merged file has the writer's own alignment.
_LEFT_OUT = frozenset({SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS, "general.alignment"})


class CopyProgress(Protocol):
    """Told how far a copy is, in bytes."""

    def begin(self, stage: str, total: int) -> None: ...
    def step(self, done: int, text: str) -> None: ...


class Quiet:
    """A ``CopyProgress`` that tells nobody."""

    def begin(self, stage: str, total: int) -> None: ...
    def step(self, done: int, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that can be done: what to copy, and the file that comes of it."""

    files: GgufSet
    layout: FileLayout
    target: Path

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def is_done(self) -> bool:
        """Whether the target is there already: its size and header are those of the merge."""
        try:
            if self.target.stat().st_size != self.nbytes:
                return False
            with self.target.open("rb") as file:
                return file.read(len(self.layout.header)) == self.layout.header
        except FileNotFoundError:
            return False


def plan_merge(files: GgufSet, target: Path) -> Merge:
    """Lay the merged file out.

    Raises:
        InputError: a name that GGUF cannot carry.
    """
    keys = [_entry(key, value) for key, value in files.metadata.items() if key not in _LEFT_OUT]
    layout = lay_out(keys, [TensorEntry(t.name, t.shape, t.qtype) for t in files.tensors])
    return Merge(files, layout, target)


def check_room(merge: Merge) -> None:
    """Compare free space with the merged file.

    Raises:
        OutputError: too little, or another file of this name is there.
    """
    if merge.target.exists():
        raise OutputError(
            f"{merge.target} is there already and is another file", "remove it, or choose another folder with --out"
        )
    folder = merge.target.parent
    free = free_bytes(folder)
    if free < merge.nbytes:
        raise OutputError(
            f"merging takes {merge.nbytes:,} bytes in {folder}, {free:,} are free",
            "free some space, or give --out on another disk",
        )


def run_merge(merge: Merge, progress: CopyProgress) -> None:
    """Write the merged file; it gets its name when it is whole.

    Raises:
        OutputError: the disk is full or fails.
        InputError: a file of the set is shorter than its header says.
    """
    partial = merge.target.with_name(merge.target.name + PARTIAL)
    progress.begin("merge", merge.nbytes)
    done = told = 0
    try:
        with disk_faults(partial), partial.open("wb") as out:
            out.write(merge.layout.header)
            offsets = iter(merge.layout.offsets)
            for path, header in zip(merge.files.paths, merge.files.headers, strict=True):
                with path.open("rb") as source:
                    for tensor in header.tensors:
                        out.seek(next(offsets))
                        source.seek(tensor.offset)
                        for data in _chunks(source, tensor.nbytes, path, tensor.name):
                            out.write(data)
                            done += len(data)
                            if done >= told + merge.nbytes // _STEPS:
                                told = done
                                progress.step(done, tensor.name)
            out.truncate(merge.nbytes)
            out.flush()
            os.fsync(out.fileno())
        with disk_faults(merge.target):
            partial.replace(merge.target)
            sync_directory(merge.target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _chunks(source: BinaryIO, nbytes: int, path: Path, name: str) -> Iterator[bytes]:
    while nbytes:
        data = source.read(min(nbytes, _CHUNK))
        if not data:
            raise InputError(f"{path} ends inside the tensor {name}", "get the file again")
        nbytes -= len(data)
        yield data


def _entry(key: str, value: GgufValue) -> MetadataEntry:
    content = value.value
    if isinstance(content, StringArray):
        raw: Sequence[bytes] = [content.raw(index) for index in range(len(content))]
        return MetadataEntry(key, value.type, raw, value.element)
    return MetadataEntry(key, value.type, content, value.element)
