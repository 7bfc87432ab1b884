"""A checkpoint in memory, for tests: implements ``convert.domain.Source`` over numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from convert.domain import Shard, SourceTensor
from convert.transforms import Array

_WIDTHS = {"BF16": "<u2", "F32": "<f4", "U8": "u1", "F8_E8M0": "u1"}


class MemorySource:
    """``tensors``: (dtype, array) by name; ``shards``: names of the tensors of each shard. BF16 arrays are U16 bits."""

    def __init__(self, tensors: Mapping[str, tuple[str, Array]], shards: Sequence[Sequence[str]] | None = None) -> None:
        self.label = self.origin = "memory"
        self.revision = None
        self.warnings: Sequence[str] = ()
        self.log: list[str] = []
        self.reads: list[tuple[int, int, int]] = []
        self.stamps: dict[int, str] = {}
        self._data: list[bytes] = []
        placed: dict[str, SourceTensor] = {}
        for index, names in enumerate(shards if shards is not None else [list(tensors)]):
            data = b""
            for name in names:
                dtype, array = tensors[name]
                raw = np.ascontiguousarray(array).astype(_WIDTHS[dtype], copy=False).tobytes()
                placed[name] = SourceTensor(name, dtype, array.shape, index, len(data), len(data) + len(raw))
                data += raw
            self._data.append(data)
        self.tensors: Mapping[str, SourceTensor] = placed
        self.shards = [Shard(f"shard-{n}", len(data), "0" * 64) for n, data in enumerate(self._data)]

    def read_file(self, name: str) -> bytes | None:
        return None

    def stamp(self, shard: int) -> str:
        return self.stamps.get(shard, "same")

    def acquire(self, shard: int) -> None:
        self.log.append(f"acquire {shard}")

    def release(self, shard: int) -> None:
        self.log.append(f"release {shard}")

    def read_into(self, shard: int, offset: int, buffer: memoryview) -> None:
        self.reads.append((shard, offset, offset + len(buffer)))
        buffer[:] = self._data[shard][offset : offset + len(buffer)]
