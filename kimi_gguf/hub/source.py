"""A checkpoint on the Hub as a ``Source``: planned from ranges, then held one or two shards at a time.

    open      config.json, index and side files whole; of each shard its header, by exact ranges
    acquire   the shard is fetched and checked (or is in the library's cache, which is only read)
    release   the shard is removed

A range of a shard that is not on disk is read from the Hub, so that a sample can be looked at without the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock

from convert.disk import free_bytes
from convert.domain import Plan, Shard, SourceTensor
from convert.flags import parse_size
from convert.safetensors_header import parse_header
from convert.source import LocalSource, collect_tensors
from convert.source_files import INDEX, MAX_SIDE_FILE_BYTES, choose_shards
from kimi_gguf.hub.address import HubAddress
from kimi_gguf.hub.budget import DiskBudget, ShardNeed, shard_need
from kimi_gguf.hub.repository import HubFile, Repository, open_repository
from kimi_gguf.hub.retry import Note
from kimi_gguf.hub.shard_store import Advance, ShardStore, header_sha256
from kimi_gguf.hub.transport import silent
from quant.errors import InputError, OutputError

_READERS = 8
# Enough for the length, and for seeing that a file is a Git LFS pointer.
_HEAD_BYTES = 64


class HubSource(LocalSource):
    """Implements ``convert.domain.Source`` over a repository; made by ``open_hub_source``.

    Attributes:
        repository: at the commit that was pinned.
        store: where fetched shards are.
        budget: of disk; counts the shards that are fetched.
    """

    def __init__(
        self,
        repository: Repository,
        shards: Sequence[Shard],
        tensors: dict[str, SourceTensor],
        warnings: Sequence[str],
        store: ShardStore,
        max_disk: int | None,
    ) -> None:
        label = repository.address.repo.rpartition("/")[2]
        super().__init__(store.directory, label, repository.commit, shards, tensors, warnings)
        self.repository = repository
        self.store = store
        self.max_disk = max_disk
        self.budget = DiskBudget(repository.transport.stop)
        self._listed = [repository.files[shard.name] for shard in shards]
        self._cached = {n: p for n, file in enumerate(self._listed) if (p := repository.cached(file)) is not None}
        self._here: set[int] = set()
        self._side_files: dict[str, bytes | None] = {}
        self._busy = Lock()

    @property
    def origin(self) -> str:
        return self.repository.origin

    def read_file(self, name: str) -> bytes | None:
        """Content of a side file, checked against its hash; None when there is none."""
        if name not in self._side_files:
            self._side_files[name] = read_side_file(self.repository, name)
        return self._side_files[name]

    def stamp(self, shard: int) -> str:
        """The hash that the Hub lists."""
        return self._listed[shard].hash

    def path(self, shard: int) -> Path:
        return self._cached.get(shard) or self.store.path(self._listed[shard])

    @property
    def present(self) -> Collection[int]:
        """Shards that the library's cache holds."""
        return self._cached.keys()

    def shards_on_disk(self) -> int:
        """Bytes of fetched shards and parts of shards."""
        return sum(self.store.on_disk(file) for file in self._listed)

    def acquire(self, shard: int) -> None:
        """Fetch a shard, when there is room for it.

        Raises:
            InputError: it cannot be had, is another file than the Hub lists, or than the plan was made from.
            OutputError: the disk is full.
        """
        with self._busy:
            if shard not in self._cached and shard not in self._here:
                file = self._listed[shard]
                self.store.open()
                # Shards come in order: an earlier one that nobody holds is what a run that was killed left behind.
                for earlier in range(shard):
                    if earlier not in self._here:
                        self.store.remove(self._listed[earlier])
                self.budget.take(file.nbytes)
                path = self.store.fetch(file)
                found, planned = header_sha256(path), self.shards[shard].header_sha256
                if found != planned:
                    raise InputError(
                        f"{file.path}: its header has the hash {found}; the plan was made from one with {planned}",
                        "wrong bytes came when the conversion was planned: start again with --overwrite",
                    )
                self._here.add(shard)
        super().acquire(shard)

    def release(self, shard: int) -> None:
        """Remove a shard, unless it is kept or was in the cache."""
        super().release(shard)
        if shard in self._here:
            self._here.discard(shard)
            self.store.remove(self._listed[shard])
            if not self.store.keep:
                self.budget.give(self._listed[shard].nbytes)

    def read_into(self, shard: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from disk, or by a range when the shard is not there."""
        if shard in self._here or shard in self._cached:
            super().read_into(shard, offset, buffer)
            return
        view = buffer.cast("B")
        file = self._listed[shard]
        if offset + len(view) > file.nbytes:
            raise InputError(
                f"{file.path}: has {file.nbytes} bytes, {offset + len(view)} were asked for",
                "its header was damaged on the way: run the same command again",
            )
        view[:] = self.repository.transport.read(file.path, offset, offset + len(view), file.nbytes)

    def need(self, plan: Plan, output: int | None = None) -> ShardNeed:
        """What the shards of a plan take on disk.

        Args:
            output: most bytes of output on disk at once; all of the plan's by default.

        Raises:
            OutputError: more than ``--max-disk`` allows; names what is needed.
        """
        need = shard_need(plan, self, self._cached.keys())
        if self.store.keep:
            need = replace(need, least=need.total, ahead=need.total)
        output = plan.nbytes if output is None else output
        if self.max_disk is not None and output + need.least > self.max_disk:
            raise OutputError(
                f"--max-disk {self.max_disk:,} is less than the {output + need.least:,} bytes needed: "
                f"{output:,} for the output and {need.least:,} for shards",
                f"give --max-disk {_billions(output + need.least)}, or --publish with --as-you-go",
            )
        return need

    def check_disk(self, plan: Plan, directory: Path, output: int | None = None) -> ShardNeed:
        """Compare what a conversion into ``directory`` needs with ``--max-disk`` and with what is free, and set the
        budget of shards from it.

        Raises:
            OutputError: too little; names what is needed.
        """
        need = self.need(plan, output)
        output = plan.nbytes if output is None else output
        there = self.shards_on_disk()
        shards_at, output_at = existing(self.store.directory), existing(directory)
        free = free_bytes(shards_at) + there
        if shards_at.stat().st_dev == output_at.stat().st_dev:
            held = [directory / name for file in plan.files for name in (file.name, f"{file.name}.partial")]
            free -= max(output - sum(path.stat().st_blocks * 512 for path in held if path.exists()), 0)
        if need.least > free:
            raise OutputError(
                f"{shards_at} has room for {max(free, 0):,} bytes of shards; {need.least:,} are needed, "
                f"beside {output:,} for the output in {output_at}",
                "free some space, or give --download-dir on another filesystem",
            )
        limits = [free] if self.max_disk is None else [free, self.max_disk - output]
        self.budget.limit = min(limits)
        return need

    def claim(self) -> None:
        """Take the folder of shards.

        Raises:
            UsageError: it holds other things, or shards of another repository.
            OutputError: another process works in it, or it cannot be written.
        """
        self.store.open()

    def finished(self) -> None:
        """The conversion is done: nothing that was fetched is needed any more."""
        self.store.clear()

    def close(self) -> None:
        """Call off what is under way, close the shards, and give up the folder; what is fetched stays."""
        self.repository.transport.stop.set()
        super().close()
        with self._busy:
            self.store.close()


def open_hub_source(
    address: HubAddress,
    *,
    download_dir: Path,
    max_disk: str | int | None = None,
    keep_shards: bool = False,
    note: Note = silent,
    fetched: Advance = lambda nbytes: None,
) -> HubSource:
    """Open a checkpoint on the Hub; nothing is stored yet.

    Args:
        address: repository and revision; its path must be empty.
        download_dir: where shards will be while they are needed.
        max_disk: bytes, as ``200G``, that shards and output may take together.
        keep_shards: shards stay in ``download_dir``.
        note: told of waits and of the commit that was pinned.
        fetched: told, from any thread, how many bytes of shards came.

    Raises:
        InputError: the Hub refuses or cannot be reached, or the repository holds no sound checkpoint.
        UsageError: ``max_disk`` is not a size.
    """
    limit = None if max_disk is None else parse_size(max_disk)
    repository = open_repository(address, stop=Event(), note=note, first_contact=True)
    listing = choose_shards(
        address.repo,
        [path for path in repository.files if "/" not in path],
        read_side_file(repository, INDEX),
        repository.files.__contains__,
    )
    with ThreadPoolExecutor(_READERS, thread_name_prefix="headers") as readers:
        try:
            headers = list(
                readers.map(lambda n: _read_header(repository, listing.names[n], n), range(len(listing.names)))
            )
        except BaseException:
            repository.transport.stop.set()
            raise
    tensors, warnings = collect_tensors(listing, [held for _, held in headers])
    store = ShardStore(repository, download_dir, keep=keep_shards, fetched=fetched)
    return HubSource(repository, [shard for shard, _ in headers], tensors, warnings, store, limit)


def read_side_file(repository: Repository, name: str) -> bytes | None:
    """A side file of a repository, None when it has none.

    Raises:
        InputError: larger than 512 MB, or it cannot be had.
    """
    file = repository.files.get(name)
    if file is None:
        return None
    if file.nbytes > MAX_SIDE_FILE_BYTES:
        raise InputError(f"{name}: {file.nbytes} bytes, at most {MAX_SIDE_FILE_BYTES} are read", "is it a checkpoint?")
    return repository.read_whole(name)


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _read_header(repository: Repository, name: str, index: int) -> tuple[Shard, list[SourceTensor]]:
    file: HubFile = repository.files[name]
    head = repository.read(name, 0, _HEAD_BYTES)

    def read(offset: int, length: int) -> bytes:
        end = offset + length
        return head[offset:end] if end <= len(head) else repository.read(name, offset, length)

    tensors, digest = parse_header(read, name, file.nbytes, index)
    return Shard(name, file.nbytes, digest, file.sha256), tensors


def _billions(nbytes: int) -> str:
    return f"{-(-nbytes // 10**9)}G"
