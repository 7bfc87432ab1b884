"""Weights of a checkpoint in the released format, one tensor at a time, as float32 tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convert.config import parse_config
from convert.domain import Source, SourceTensor
from convert.source import open_source
from kimi_gguf.reference.situ import MlpWeights
from kimi_gguf.reference.weights import CheckpointNamedStore, check_weights, expert_prefix
from quant import encode
from quant.errors import InputError
from quant.tensors import Bf16Rows, F32Rows, Mxfp4Rows, U8Array

TEXT_PREFIX = "language_model."
_ITEM_BYTES = {"BF16": 2, "F32": 4}


class CheckpointStore(CheckpointNamedStore):
    """A ``WeightStore`` over a ``Source``; names are found with and without the ``language_model.`` prefix.

    Raises:
        InputError: no config.json, or, when asked for, a tensor that is missing or of an unknown dtype.
    """

    def __init__(self, source: Source) -> None:
        text = source.read_file("config.json")
        if text is None:
            raise InputError(f"{source.label}: no config.json", "name the folder of a whole checkpoint")
        super().__init__(parse_config(text))
        self.source = source

    def tensor(self, name: str) -> Tensor:
        if self._find(f"{name}_packed") is not None:
            return self._packed(name)
        found = self._get(name)
        return torch.from_numpy(self._plain(found, 0, found.nbytes)).view(found.shape)

    def has(self, name: str) -> bool:
        return self._find(name) is not None or self._find(f"{name}_packed") is not None

    def rows(self, name: str, ids: Tensor) -> Tensor:
        found = self._get(name)
        width = found.nbytes // found.shape[0]
        unique, place = torch.unique(ids, return_inverse=True)
        read = np.stack([self._plain(found, row * width, width) for row in unique.tolist()])
        return torch.from_numpy(read)[place]

    def output_rows(self, begin: int, end: int) -> Tensor:
        found = self._get(self._output_name())
        width = found.nbytes // found.shape[0]
        return torch.from_numpy(self._plain(found, begin * width, (end - begin) * width)).view(end - begin, -1)

    def stored(self) -> Iterable[tuple[str, int]]:
        return ((name, tensor.nbytes) for name, tensor in self.source.tensors.items())

    def close(self) -> None:
        """Closes shards that the source keeps open, where it does."""
        close = getattr(self.source, "close", None)
        if close is not None:
            close()

    def expert(self, layer: int, expert: int) -> MlpWeights:
        prefix = expert_prefix(layer, expert)
        gate, up, down = (self.tensor(f"{prefix}{part}.weight") for part in ("w1", "w3", "w2"))
        return MlpWeights(gate, up, down)

    def _find(self, name: str) -> SourceTensor | None:
        tensors = self.source.tensors
        return tensors.get(name) or tensors.get(name.removeprefix(TEXT_PREFIX))

    def _get(self, name: str) -> SourceTensor:
        found = self._find(name)
        if found is None:
            raise InputError(f"{self.source.label}: no tensor {name}", "config.json and shards must belong together")
        return found

    def _read(self, tensor: SourceTensor, begin: int, size: int) -> U8Array:
        data = np.empty(size, dtype=np.uint8)
        self.source.read_into(tensor.shard, tensor.begin + begin, memoryview(data.data))
        return data

    def _plain(self, tensor: SourceTensor, begin: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """``size`` bytes of a BF16 or F32 tensor as a float32 vector."""
        if tensor.dtype not in _ITEM_BYTES:
            raise InputError(f"{tensor.name} is {tensor.dtype}; weights may be BF16, F32, or MXFP4 in two parts")
        data = self._read(tensor, begin, size)
        if tensor.dtype == "F32":
            values = encode.to_float(F32Rows(data.view(np.float32)[None])).reshape(-1)
        else:
            values = encode.to_float(Bf16Rows(data.view(np.uint16)[None])).reshape(-1)
        check_weights(values, f"{self.source.label}: tensor {tensor.name}")
        return values

    def _packed(self, name: str) -> Tensor:
        packed, scale = self._get(f"{name}_packed"), self._get(f"{name}_scale")
        rows = packed.shape[0]
        codes = self._read(packed, 0, prod(packed.shape)).reshape(rows, -1)
        scales = self._read(scale, 0, prod(scale.shape)).reshape(rows, -1)
        return torch.from_numpy(encode.to_float(Mxfp4Rows(codes, scales)))


def open_checkpoint(path: Path) -> CheckpointStore:
    """The weights of the checkpoint in folder ``path``."""
    return CheckpointStore(open_source(path))
