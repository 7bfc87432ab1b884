"""A source that stands before another one: the same checkpoint, acquired in another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convert.domain import Shard, Source, SourceTensor
from kimi_gguf.hub.source import HubSource


class SourceProxy:
    """A ``convert.domain.Source`` that does what ``inner`` does."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner

    @property
    def label(self) -> str:
        return self.inner.label

    @property
    def origin(self) -> str:
        return self.inner.origin

    @property
    def shards(self) -> Sequence[Shard]:
        return self.inner.shards

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self.inner.tensors

    @property
    def warnings(self) -> Sequence[str]:
        return self.inner.warnings

    @property
    def revision(self) -> str | None:
        return self.inner.revision

    def read_file(self, name: str) -> bytes | None:
        return self.inner.read_file(name)

    def stamp(self, shard: int) -> str:
        return self.inner.stamp(shard)

    def acquire(self, shard: int) -> None:
        self.inner.acquire(shard)

    def read_into(self, shard: int, offset: int, buffer: memoryview) -> None:
        self.inner.read_into(shard, offset, buffer)

    def release(self, shard: int) -> None:
        self.inner.release(shard)


class RangedSource(SourceProxy):
    """A checkpoint on the Hub of which only ranges are read: no shard is fetched."""

    def __init__(self, inner: HubSource) -> None:
        super().__init__(inner)
        self._present = inner.present

    def acquire(self, shard: int) -> None:
        if shard in self._present:
            self.inner.acquire(shard)

    def release(self, shard: int) -> None:
        if shard in self._present:
            self.inner.release(shard)
