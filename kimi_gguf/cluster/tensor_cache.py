"""A worker's tensor cache, filled from a local copy of the model, so that a head sends hashes instead of weights.

``ggml-rpc-server -c`` keeps each tensor of more than 10 MiB in a file named by the 64-bit FNV-1a of its bytes
(llama.cpp's ggml-rpc.cpp); a head offers that hash first and sends the bytes only when the file is not there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np

from convert.disk import disk_faults
from kimi_gguf.cluster.runtime_build import default_jobs
from quant.digest import fnv1a64
from quant.errors import InputError, OutputError, UsageError
from quant.gguf_parser import GgufTensor
from quant.gguf_split import read_gguf_set
from quant.tensors import U8Array

THRESHOLD = 10 << 20
"""Tensors of more bytes than this are cached."""

_PIECE = 64 << 20
_LAYER = re.compile(r"blk\.(\d+)\.")
_HEAD_ONLY = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What seeding did: tensors and bytes that the cache now holds of the model, and bytes that were written."""

    tensors: int
    nbytes: int
    written: int
    complete: bool


def seed_cache(
    model: Path,
    folder: Path,
    *,
    layers: range | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
    stop: Event | None = None,
) -> SeedResult:
    """Put the large tensors of ``model`` into the cache ``folder``.

    The token embedding is left out, a head keeps it. Files appear under their names when they are whole.

    Args:
        model: a GGUF, or any file of a split set.
        layers: only these layers and what belongs to none.
        step: told bytes done and bytes in total.
        stop: ends the work early when set.

    Raises:
        InputError: the model cannot be read.
        OutputError: the disk has no room.
    """
    work = list(_tensors(model, layers))
    total = sum(tensor.nbytes for _, tensor in work)
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.seeding"):
            stale.unlink(missing_ok=True)
    done = written = 0
    with ThreadPoolExecutor(default_jobs()) as pool:
        futures = [pool.submit(_seed, folder, path, tensor, stop) for path, tensor in work]
        try:
            for future, (_, tensor) in zip(futures, work, strict=True):
                new = future.result()
                if new is None:
                    return SeedResult(len(work), done, written, complete=False)
                written += new
                done += tensor.nbytes
                step(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return SeedResult(len(work), done, written, complete=True)


def parse_layers(text: str) -> range:
    """The layers of ``A-B``, both included, or of ``A``.

    Raises:
        UsageError: not of this form.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise UsageError(f"{text!r} names no layers", "write FIRST-LAST, for example 0-30")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def _tensors(model: Path, layers: range | None) -> Iterator[tuple[Path, GgufTensor]]:
    files = read_gguf_set(model)
    for path, header in zip(files.paths, files.headers, strict=True):
        for tensor in header.tensors:
            layer = _LAYER.match(tensor.name)
            wanted = layers is None or layer is None or int(layer[1]) in layers
            if tensor.nbytes > THRESHOLD and wanted and tensor.name != _HEAD_ONLY:
                if tensor.offset + tensor.nbytes > header.file_size:
                    raise InputError(f"{path} ends inside {tensor.name}", "get the file again")
                yield path, tensor


def _seed(folder: Path, path: Path, tensor: GgufTensor, stop: Event | None) -> int | None:
    """Bytes written for a tensor; None when told to stop."""
    if stop is not None and stop.is_set():
        return None
    data = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    return _keep(folder / f"{_hash(data):016x}", data)


def _hash(data: U8Array) -> int:
    value = fnv1a64(data[:0])
    for begin in range(0, data.size, _PIECE):
        value = fnv1a64(data[begin : begin + _PIECE], value)
    return value


def _keep(path: Path, data: U8Array) -> int:
    """Write ``data`` unless the file is there; bytes written."""
    if path.is_file() and path.stat().st_size == data.size:
        return 0
    free = shutil.disk_usage(path.parent).free
    if free < data.size:
        raise OutputError(
            f"the tensor cache {path.parent} needs {data.size:,} bytes for one more tensor, {free:,} are free",
            "choose another place with --cache, or seed fewer layers with --seed-layers",
        )
    partial = path.with_name(f"{path.name}.{os.getpid()}.seeding")
    with disk_faults(path.parent):
        try:
            with partial.open("wb") as file:
                for begin in range(0, data.size, _PIECE):
                    file.write(data[begin : begin + _PIECE].data)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return data.size
