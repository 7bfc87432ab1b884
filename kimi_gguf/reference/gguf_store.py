"""Weights of a kimi-k3 or kimi-k31 GGUF, of any tensor type, dequantized one tensor or one expert at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convert.config import Arch, ModelConfig
from convert.gguf_config import KeyReader
from kimi_gguf.reference.indexer import IndexerWeights
from kimi_gguf.reference.kda import KdaWeights
from kimi_gguf.reference.mla import MlaWeights
from kimi_gguf.reference.moe import MoeWeights
from kimi_gguf.reference.situ import MlpWeights
from kimi_gguf.reference.weights import BlockNorms, HeadWeights, check_weights
from quant import ggml
from quant.errors import InputError
from quant.gguf_parser import GgufTensor
from quant.gguf_split import read_gguf_set
from quant.types import row_bytes

ARCHITECTURES: dict[str, Arch] = {"kimi-k3": "kimi-k3", "kimi-k31": "kimi-k31"}
DEFAULT_INDEXER_EPS = 1e-5


class GgufStore:
    """A ``WeightStore`` over a GGUF file or split set.

    Each tensor is read with one ``pread`` of its bytes, a single expert or embedding row with one of its own.

    Args:
        path: the file, or any file of a set.

    Attributes:
        indexer_eps: the file's own LayerNorm eps, for ``Options.indexer_eps``; 1e-5 when it names none.

    Raises:
        InputError: not a Kimi GGUF, a key that is missing, or, when asked for, a tensor that is missing.
    """

    def __init__(self, path: Path) -> None:
        files = read_gguf_set(path)
        self.path = path
        self._places: dict[str, tuple[int, GgufTensor]] = {
            tensor.name: (number, tensor) for number, header in enumerate(files.headers) for tensor in header.tensors
        }
        arch = files.headers[0].get_str("general.architecture")
        if arch not in ARCHITECTURES:
            raise InputError(f"{path}: architecture {arch!r}", f"the reference knows {', '.join(ARCHITECTURES)}")
        keys = KeyReader(ARCHITECTURES[arch], files.metadata, len(self._places))
        config = keys.config(latent_norm=any(name.endswith("ffn_routed_norm.weight") for name in self._places))
        if config is None:
            raise InputError(f"{path}: {keys.faults[0]}")
        self._config = config
        eps = files.metadata.get(f"{arch}.attention.layer_norm_epsilon")
        self.indexer_eps = eps.value if eps is not None and isinstance(eps.value, float) else DEFAULT_INDEXER_EPS
        self._descriptors = [os.open(p, os.O_RDONLY | os.O_CLOEXEC) for p in files.paths]

    @property
    def config(self) -> ModelConfig:
        return self._config

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor called ``name``."""
        return name in self._places

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``, float32 in its row-major shape."""
        shape = self._place(name)[1].shape
        return self._decode(name, 0, int(np.prod(shape[:-1], dtype=np.int64))).view(shape)

    def norms(self, layer: int) -> BlockNorms:
        names = ("attn_norm", "ffn_norm", "attn_res_score", "ffn_res_score")
        return BlockNorms(*(self.tensor(f"blk.{layer}.{name}.weight") for name in names))

    def kda(self, layer: int) -> KdaWeights:
        def matrix(name: str) -> Tensor:
            return self.tensor(f"blk.{layer}.{name}.weight")

        def taps(name: str) -> Tensor:
            return matrix(f"ssm_conv1d_{name}").view(-1, self.config.kda.conv_kernel)

        return KdaWeights(
            q=matrix("attn_q"),
            k=matrix("attn_k"),
            v=matrix("attn_v"),
            q_conv=taps("q"),
            k_conv=taps("k"),
            v_conv=taps("v"),
            f_a=matrix("ssm_f_a"),
            f_b=matrix("ssm_f_b"),
            b=matrix("ssm_beta"),
            # The file holds -exp(A_log).
            decay=-self.tensor(f"blk.{layer}.ssm_a").view(-1),
            dt_bias=self.tensor(f"blk.{layer}.ssm_dt.bias"),
            g=matrix("ssm_g"),
            o_norm=matrix("ssm_norm"),
            o=matrix("attn_output"),
        )

    def mla(self, layer: int) -> MlaWeights:
        def matrix(name: str) -> Tensor:
            return self.tensor(f"blk.{layer}.{name}.weight")

        return MlaWeights(
            q_a=matrix("attn_q_a"),
            q_norm=matrix("attn_q_a_norm"),
            q_b=matrix("attn_q_b"),
            kv_a=matrix("attn_kv_a_mqa"),
            kv_norm=matrix("attn_kv_a_norm"),
            # Stored transposed per head, [H, kv_lora, nope].
            k_b=matrix("attn_k_b").transpose(1, 2).contiguous(),
            v_b=matrix("attn_v_b"),
            g=matrix("attn_gate") if self.has(f"blk.{layer}.attn_gate.weight") else None,
            o=matrix("attn_output"),
        )

    def indexer(self, layer: int) -> IndexerWeights | None:
        base = f"blk.{layer}.indexer."
        if not self.has(f"{base}attn_k.weight"):
            return None
        return IndexerWeights(
            wq_b=self.tensor(f"{base}attn_q_b.weight"),
            wk=self.tensor(f"{base}attn_k.weight"),
            weights=self.tensor(f"{base}proj.weight"),
            k_norm=self.tensor(f"{base}k_norm.weight"),
            k_bias=self.tensor(f"{base}k_norm.bias") if self.has(f"{base}k_norm.bias") else None,
        )

    def dense(self, layer: int) -> MlpWeights:
        return self._mlp(layer, "")

    def moe(self, layer: int) -> MoeWeights:
        base = f"blk.{layer}."
        norm = f"{base}ffn_routed_norm.weight"
        bias = f"{base}exp_probs_b.bias"
        return MoeWeights(
            router=self.tensor(f"{base}ffn_gate_inp.weight"),
            bias=self.tensor(bias) if self.has(bias) else None,
            down=self.tensor(f"{base}ffn_routed_down.weight"),
            up=self.tensor(f"{base}ffn_routed_up.weight"),
            norm=self.tensor(norm) if self.has(norm) else None,
            shared=self._mlp(layer, "_shexp") if self.config.moe.shared else None,
        )

    def expert(self, layer: int, expert: int) -> MlpWeights:
        parts = []
        for name in ("gate", "up", "down"):
            full = f"blk.{layer}.ffn_{name}_exps.weight"
            rows = self._place(full)[1].shape[1]
            parts.append(self._decode(full, expert * rows, rows))
        return MlpWeights(*parts)

    def embedding(self, ids: Tensor) -> Tensor:
        unique, place = torch.unique(ids, return_inverse=True)
        return torch.cat([self._decode("token_embd.weight", row, 1) for row in unique.tolist()])[place]

    def head(self) -> HeadWeights:
        score, norm = self.head_vectors()
        return HeadWeights(score, norm, self.tensor(self._output_name()))

    def head_vectors(self) -> tuple[Tensor, Tensor]:
        return self.tensor("output_res_score.weight"), self.tensor("output_norm.weight")

    def output_rows(self, begin: int, end: int) -> Tensor:
        return self._decode(self._output_name(), begin, end - begin)

    def stored(self) -> Iterable[tuple[str, int]]:
        return ((name, tensor.nbytes) for name, (_, tensor) in self._places.items())

    def _output_name(self) -> str:
        return "output.weight" if self.has("output.weight") else "token_embd.weight"

    def _mlp(self, layer: int, suffix: str) -> MlpWeights:
        return MlpWeights(*(self.tensor(f"blk.{layer}.ffn_{name}{suffix}.weight") for name in ("gate", "up", "down")))

    def _place(self, name: str) -> tuple[int, GgufTensor]:
        found = self._places.get(name)
        if found is None:
            raise InputError(f"{self.path}: no tensor {name}", "inspect the file; it may be damaged or incomplete")
        return found

    def _decode(self, name: str, row: int, rows: int) -> Tensor:
        """``rows`` rows of a tensor from ``row`` on, all leading axes flattened, as float32 [rows, columns]."""
        number, tensor = self._place(name)
        columns = tensor.shape[-1]
        width = row_bytes(tensor.qtype, columns)
        data = np.empty(rows * width, dtype=np.uint8)
        view = memoryview(data.data)
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptors[number], [view[done:]], tensor.offset + row * width + done)
            if count == 0:
                raise InputError(f"{self.path}: the file ends inside tensor {name}", "copy or convert it again")
            done += count
        values = ggml.decode(data.reshape(rows, width), tensor.qtype, columns)
        check_weights(values, f"{self.path}: tensor {name}")
        return torch.from_numpy(values)
