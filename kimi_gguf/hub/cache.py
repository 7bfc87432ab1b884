"""A checkpoint that the library's cache holds whole, for work without a connection. The cache is never written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from convert.source import LocalSource, open_source
from kimi_gguf.hub.address import HubAddress
from kimi_gguf.hub.faults import offline_fault

_SHA256 = re.compile(r"[0-9a-f]{64}")


class CachedSource(LocalSource):
    """A snapshot of the cache, whose blobs carry their hashes as names."""

    def __init__(self, snapshot: LocalSource, repo: str) -> None:
        super().__init__(
            snapshot.directory,
            repo.rpartition("/")[2],
            snapshot.revision,
            [replace(s, sha256=_blob_hash(snapshot.directory / s.name)) for s in snapshot.shards],
            snapshot.tensors,
            snapshot.warnings,
        )
        self._repo = repo

    @property
    def origin(self) -> str:
        return str(HubAddress(self._repo, self.revision))

    def stamp(self, shard: int) -> str:
        """The hash of the blob, as a source on the Hub has it."""
        return self.shards[shard].sha256 or super().stamp(shard)


def open_cached_source(address: HubAddress) -> CachedSource:
    """Open the snapshot of a revision that is in the cache.

    Raises:
        InputError: it is not there, or not whole.
    """
    config = try_to_load_from_cache(address.repo, "config.json", revision=address.revision)
    if not isinstance(config, str):
        raise offline_fault(str(address))
    return CachedSource(open_source(Path(config).parent), address.repo)


def _blob_hash(path: Path) -> str | None:
    name = path.resolve().name
    return name if path.is_symlink() and _SHA256.fullmatch(name) else None
