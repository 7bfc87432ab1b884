"""A checkpoint in a folder: its tensors from the shard headers, its bytes through ``preadv``.

Opening reads headers alone (75 MB for the release) and settles what can be known without data: every shard is
complete, no tensor occurs twice, the index agrees. Links of a Hub cache are followed; nothing is ever written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import MappingProxyType, TracebackType

from convert.domain import Shard, SourceTensor
from convert.safetensors_header import parse_header
from convert.source_files import Listing, index_warnings, label_and_revision, list_shards, read_side_file
from quant.errors import InputError

_RETRY = "check the disk, or download this shard again"


class LocalSource:
    """Implements ``convert.domain.Source`` over a folder; made by ``open_source``.

    A shard's file is opened at its first use and closed by ``release`` or ``close``.
    """

    def __init__(
        self,
        directory: Path,
        label: str,
        revision: str | None,
        shards: Sequence[Shard],
        tensors: Mapping[str, SourceTensor],
        warnings: Sequence[str],
    ) -> None:
        self.directory = directory
        self._label = label
        self._revision = revision
        self._shards = tuple(shards)
        self._tensors = MappingProxyType(tensors)
        self._warnings = tuple(warnings)
        self._files: dict[int, int] = {}
        self._lock = Lock()

    @property
    def label(self) -> str:
        """The model's name, never a commit."""
        return self._label

    @property
    def origin(self) -> str:
        """The folder."""
        return str(self.directory)

    @property
    def revision(self) -> str | None:
        """Commit of a Hub cache snapshot."""
        return self._revision

    @property
    def shards(self) -> Sequence[Shard]:
        return self._shards

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """By name, in the order of shards and of data within each."""
        return self._tensors

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def read_file(self, name: str) -> bytes | None:
        """Content of a side file, None when there is none."""
        return read_side_file(self.directory, name)

    def stamp(self, shard: int) -> str:
        """Size and time of change of a shard: another text once its bytes may be others."""
        name = self._shards[shard].name
        try:
            info = self.path(shard).stat()
        except OSError as error:
            raise InputError(f"{name}: cannot be read: {error.strerror}", _RETRY) from None
        return f"{info.st_size}-{info.st_mtime_ns}"

    def path(self, shard: int) -> Path:
        """Where a shard lies."""
        return self.directory / self._shards[shard].name

    def acquire(self, shard: int) -> None:
        """Opens a shard."""
        self._file(shard)

    def release(self, shard: int) -> None:
        """Closes a shard; a later read opens it again."""
        with self._lock:
            file = self._files.pop(shard, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Closes all shards. None is released: a source that fetches keeps what an interrupted run needs again."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            os.close(file)

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read_into(self, shard: int, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the shard's bytes from ``offset`` on.

        Raises:
            InputError: the file ends first, or the disk fails.
        """
        file, view = self._file(shard), buffer.cast("B")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(file, [view[done:]], offset + done)
            except OSError as error:
                name = self._shards[shard].name
                raise InputError(f"{name}: byte {offset + done} cannot be read: {error.strerror}", _RETRY) from None
            if count == 0:
                raise InputError(
                    f"{self._shards[shard].name}: ends at byte {offset + done}, expected data up to "
                    f"{offset + len(view)}; it had {self._shards[shard].nbytes} bytes when it was opened",
                    _RETRY,
                )
            done += count

    def _file(self, shard: int) -> int:
        with self._lock:
            file = self._files.get(shard)
            if file is None:
                file = self._files[shard] = _open(self.path(shard))
            return file


def open_source(path: Path | str) -> LocalSource:
    """Opens the checkpoint in folder ``path``: a plain folder or a snapshot in a Hub cache.

    Raises:
        InputError: no checkpoint there, a shard missing, truncated or unsound, or one tensor in two shards.
    """
    directory = _folder(Path(path))
    listing = list_shards(directory)
    headers = [_read_header(directory / name, name, index) for index, name in enumerate(listing.names)]
    tensors, warnings = collect_tensors(listing, [held for _, held in headers])
    label, revision = label_and_revision(directory)
    return LocalSource(directory, label, revision, [shard for shard, _ in headers], tensors, warnings)


def collect_tensors(
    listing: Listing, held: Sequence[Sequence[SourceTensor]]
) -> tuple[dict[str, SourceTensor], list[str]]:
    """All tensors of a checkpoint by name, and warnings.

    Args:
        held: the tensors of each shard of ``listing``.

    Raises:
        InputError: one tensor is in two shards, or the index lists tensors that no shard holds.
    """
    tensors: dict[str, SourceTensor] = {}
    for name, found in zip(listing.names, held, strict=True):
        for tensor in found:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise InputError(
                    f"tensor {tensor.name} is in two shards: {listing.names[other.shard]} and {name}",
                    "the folder mixes two checkpoints: move one away",
                )
    warnings = list(listing.warnings)
    if listing.index is not None:
        warnings += index_warnings(listing.index, tensors, listing.names)
    return tensors, warnings


def _folder(path: Path) -> Path:
    try:
        info = path.stat()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "name the folder that holds config.json and the shards") from None
    if not stat.S_ISDIR(info.st_mode):
        raise InputError(f"{path}: not a folder", f"name the folder of the checkpoint: {path.parent}")
    if (path / "snapshots").is_dir() and not (path / "config.json").exists():
        names = sorted(p.name for p in (path / "snapshots").iterdir())
        raise InputError(
            f"{path}: a Hub cache entry with {len(names)} snapshots, not a checkpoint",
            "name one of: " + ", ".join(str(path / "snapshots" / n) for n in names[:3]) if names else None,
        )
    return path.absolute()


def _open(path: Path) -> int:
    try:
        # A pipe or device under a shard's name would block or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path.name}: not a regular file", _RETRY)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(f"{path.name}: a link to a missing file, or gone", "finish the download") from None
    except OSError as error:
        raise InputError(
            f"{path.name}: cannot be opened: {error.strerror}", "check its permissions and the disk"
        ) from None


def _read_header(path: Path, name: str, index: int) -> tuple[Shard, list[SourceTensor]]:
    file = _open(path)
    try:
        size = os.fstat(file).st_size
        tensors, digest = parse_header(lambda offset, length: os.pread(file, length, offset), name, size, index)
    except OSError as error:
        raise InputError(f"{name}: header cannot be read: {error.strerror}", _RETRY) from None
    finally:
        os.close(file)
    return Shard(name, size, digest), tensors
