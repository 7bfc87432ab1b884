"""Writes checkpoints in the Hugging Face layout: safetensors shards, index, config and side files.

Tensors are lazy: a shard's header is computed from names, dtypes and shapes; then each tensor is made,
written and forgotten, so that memory holds one tensor at a time whatever the checkpoint's size.
Container format: 8-byte little-endian header length, JSON header, raw little-endian data.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quant.errors import UsageError

Array = npt.NDArray[Any]
Sharding = Literal["layer", "shuffled"] | int

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E8M0": 1}
_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.")
_TAIL_GROUPS = ("mm_projector.", "vision_tower.")


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that ``make`` produces when its turn comes; BF16 may be made as float32 or as raw U16 bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


TensorLike = LazyTensor | tuple[str, str, Array]


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Float32 values (finite) rounded to nearest even BF16, as raw bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)


def as_lazy(tensor: TensorLike) -> LazyTensor:
    """``tensor`` itself, or a (name, dtype, array) triple as a lazy tensor."""
    if isinstance(tensor, LazyTensor):
        return tensor
    name, dtype, array = tensor
    return LazyTensor(name, dtype, tuple(array.shape), lambda: array)


def tensor_bytes(tensor: LazyTensor) -> memoryview:
    """The tensor's values as the bytes that a shard holds.

    Raises:
        UsageError: the array made does not have the shape that was announced.
    """
    array = tensor.make()
    if tuple(array.shape) != tensor.shape:
        raise UsageError(f"tensor {tensor.name} was made with shape {array.shape}, announced as {tensor.shape}")
    if tensor.dtype == "BF16" and array.dtype != np.uint16:
        array = bf16_bits(array)
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(tensor.dtype, "u1")
    return np.ascontiguousarray(array, dtype=kind).reshape(-1).view(np.uint8).data


def shard_header(tensors: Sequence[LazyTensor]) -> bytes:
    """Length prefix and JSON header of a shard that holds ``tensors`` in this order, padded to 8 bytes."""
    entries: dict[str, Any] = {}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def released_order(tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Widest dtype first, then by name: the order of the safetensors library, which keeps data aligned."""
    return sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.name))


def split_by_layer(tensors: Iterable[LazyTensor]) -> list[list[LazyTensor]]:
    """The released split: one shard per decoder layer, then globals, projector and vision tower."""
    groups: dict[tuple[int, int], list[LazyTensor]] = {}
    for tensor in tensors:
        layer = _LAYER.match(tensor.name)
        tail = next((n for n, p in enumerate(_TAIL_GROUPS, 1) if tensor.name.startswith(p)), 0)
        groups.setdefault((0, int(layer[1])) if layer else (1, tail), []).append(tensor)
    return [released_order(groups[key]) for key in sorted(groups)]


def split_by_bytes(tensors: Iterable[LazyTensor], limit: int) -> list[list[LazyTensor]]:
    """Consecutive tensors, a new shard whenever ``limit`` bytes would be exceeded."""
    shards: list[list[LazyTensor]] = []
    room = -1
    for tensor in tensors:
        if tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def split_shuffled(tensors: Sequence[LazyTensor], seed: int) -> list[list[LazyTensor]]:
    """All tensors in random order, in as many shards as the released split would have."""
    mixed = list(tensors)
    random.Random(seed).shuffle(mixed)
    count = min(len(split_by_layer(tensors)), len(mixed))
    return [mixed[i::count] for i in range(count)]


def split_tensors(tensors: Sequence[LazyTensor], sharding: Sharding, seed: int = 0) -> list[list[LazyTensor]]:
    """Tensors of each shard under ``sharding`` (see ``write_checkpoint``)."""
    if sharding == "layer":
        return split_by_layer(tensors)
    if sharding == "shuffled":
        return split_shuffled(tensors, seed)
    return split_by_bytes(tensors, sharding)


def shard_names(count: int) -> list[str]:
    """``model-00001-of-0000NN.safetensors`` and so on, spelled as in the release."""
    return [f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)]


def write_shard(path: Path, tensors: Sequence[LazyTensor]) -> None:
    """Writes one safetensors file, one tensor in memory at a time."""
    with path.open("wb") as file:
        file.write(shard_header(tensors))
        for tensor in tensors:
            file.write(tensor_bytes(tensor))


def write_index(directory: Path, shards: Mapping[str, Sequence[LazyTensor]]) -> None:
    """Writes ``model.safetensors.index.json``."""
    total = sum(t.nbytes for tensors in shards.values() for t in tensors)
    placed = sorted((t.name, name) for name, tensors in shards.items() for t in tensors)
    # Written by hand: json.dumps with an indent takes seconds for half a million names.
    lines = ",\n".join(f"    {json.dumps(tensor)}: {json.dumps(name)}" for tensor, name in placed)
    head = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n'
    (directory / "model.safetensors.index.json").write_text(f"{head}{lines}\n  }}\n}}")


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Iterable[TensorLike],
    *,
    sharding: Sharding = "layer",
    seed: int = 0,
    tiktoken_model: bytes | None = None,
    extra_files: Mapping[str, bytes | str | Mapping[str, Any]] | None = None,
    write: Callable[[Path, Sequence[LazyTensor]], None] = write_shard,
) -> Path:
    """Writes a whole checkpoint into ``directory`` (made when missing).

    Args:
        config: becomes config.json.
        tensors: lazy tensors, or (name, safetensors dtype, array) triples.
        sharding: "layer" as released; bytes per shard; or "shuffled" (by ``seed``).
        tiktoken_model: becomes tiktoken.model.
        extra_files: name -> content; mappings are written as JSON.
        write: how one shard is written.

    Returns:
        ``directory``.
    """
    groups = split_tensors([as_lazy(t) for t in tensors], sharding, seed)
    shards = dict(zip(shard_names(len(groups)), groups, strict=True))
    directory.mkdir(parents=True, exist_ok=True)
    for name, group in shards.items():
        write(directory / name, group)
    write_index(directory, shards)
    files = {"config.json": config, **(extra_files or {})}
    if tiktoken_model is not None:
        files["tiktoken.model"] = tiktoken_model
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) if isinstance(content, Mapping) else content
        (directory / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return directory
