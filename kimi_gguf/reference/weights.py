"""Where a layer's weights come from: one interface, and its implementation over tensors with checkpoint names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convert.config import ModelConfig
from kimi_gguf.reference.indexer import IndexerWeights
from kimi_gguf.reference.kda import KdaWeights
from kimi_gguf.reference.mla import MlaWeights
from kimi_gguf.reference.moe import MoeWeights
from kimi_gguf.reference.situ import MlpWeights
from quant.errors import InputError

ROOT = "language_model.model."
OUTPUT = "language_model.lm_head.weight"


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """The vectors around the two sublayers, [d] each.

    Attributes:
        attention, ffn: RMSNorm weights of the sublayers' inputs.
        attention_score, ffn_score: residual norm weight times residual projection, for ``attn_res.mix``.
    """

    attention: Tensor
    ffn: Tensor
    attention_score: Tensor
    ffn_score: Tensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """After the last layer: residual score [d], final norm [d], output matrix [V, d]."""

    score: Tensor
    norm: Tensor
    output: Tensor


class WeightStore(Protocol):
    """Weights of a whole model, handed out one block at a time as float32 tensors.

    Nothing is kept: each call reads, decodes and returns. ``expert`` is one routed expert, so that a layer of 896
    experts never has more than one of them in memory.
    """

    @property
    def config(self) -> ModelConfig: ...
    def norms(self, layer: int) -> BlockNorms: ...
    def kda(self, layer: int) -> KdaWeights: ...
    def mla(self, layer: int) -> MlaWeights: ...
    def indexer(self, layer: int) -> IndexerWeights | None: ...
    def dense(self, layer: int) -> MlpWeights: ...
    def moe(self, layer: int) -> MoeWeights: ...
    def expert(self, layer: int, expert: int) -> MlpWeights: ...
    def embedding(self, ids: Tensor) -> Tensor:
        """Rows of the embedding, ids [...] -> [..., d]; only these rows are read."""
        ...

    def head(self) -> HeadWeights: ...
    def head_vectors(self) -> tuple[Tensor, Tensor]:
        """Residual score [d] and final norm [d] of the head, without its matrix."""
        ...

    def output_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the output matrix; only these rows are read."""
        ...

    def stored(self) -> Iterable[tuple[str, int]]:
        """Names of the stored tensors and their bytes on disk."""
        ...

    def close(self) -> None:
        """Close the files; nothing can be read after this."""
        ...


def expert_prefix(layer: int, expert: int) -> str:
    """Checkpoint name of a routed expert up to ``w1``, ``w2`` or ``w3``."""
    return f"{ROOT}layers.{layer}.block_sparse_moe.experts.{expert}."


class CheckpointNamedStore(ABC):
    """A ``WeightStore`` over tensors that carry the released checkpoint's names and shapes.

    Subclasses say how a tensor, some rows of it, or an expert's matrix is obtained.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @property
    def config(self) -> ModelConfig:
        return self._config

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a tensor called ``name``."""

    @abstractmethod
    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows ``ids`` of a matrix."""

    @abstractmethod
    def expert(self, layer: int, expert: int) -> MlpWeights:
        """One routed expert: w1 is the gate, w3 up, w2 down."""

    def _score(self, prefix: str) -> Tensor:
        return self.tensor(f"{prefix}_norm.weight").float() * self.tensor(f"{prefix}_proj.weight").float()[0]

    def _mlp(self, prefix: str) -> MlpWeights:
        gate, up, down = (self.tensor(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return MlpWeights(gate, up, down)

    def norms(self, layer: int) -> BlockNorms:
        base = f"{ROOT}layers.{layer}."
        return BlockNorms(
            attention=self.tensor(f"{base}input_layernorm.weight").float(),
            ffn=self.tensor(f"{base}post_attention_layernorm.weight").float(),
            attention_score=self._score(f"{base}self_attention_res"),
            ffn_score=self._score(f"{base}mlp_res"),
        )

    def kda(self, layer: int) -> KdaWeights:
        base = f"{ROOT}layers.{layer}.self_attn."
        heads = self.config.kda.heads

        def matrix(part: str) -> Tensor:
            return self.tensor(f"{base}{part}.weight")

        return KdaWeights(
            q=matrix("q_proj"),
            k=matrix("k_proj"),
            v=matrix("v_proj"),
            q_conv=matrix("q_conv1d").squeeze(1),
            k_conv=matrix("k_conv1d").squeeze(1),
            v_conv=matrix("v_conv1d").squeeze(1),
            f_a=matrix("f_a_proj"),
            f_b=matrix("f_b_proj"),
            b=matrix("b_proj"),
            # A_log is stored padded to a multiple of 128; the padding is no head.
            decay=torch.exp(self.tensor(f"{base}A_log")[:heads]),
            dt_bias=self.tensor(f"{base}dt_bias"),
            g=matrix("g_proj"),
            o_norm=matrix("o_norm"),
            o=matrix("o_proj"),
        )

    def mla(self, layer: int) -> MlaWeights:
        base = f"{ROOT}layers.{layer}.self_attn."
        config = self.config.mla

        def matrix(part: str) -> Tensor:
            return self.tensor(f"{base}{part}.weight")

        kv_b = matrix("kv_b_proj").view(config.heads, config.nope + config.v, config.kv_lora)
        return MlaWeights(
            q_a=matrix("q_a_proj"),
            q_norm=matrix("q_a_layernorm").float(),
            q_b=matrix("q_b_proj"),
            kv_a=matrix("kv_a_proj_with_mqa"),
            kv_norm=matrix("kv_a_layernorm").float(),
            k_b=kv_b[:, : config.nope],
            v_b=kv_b[:, config.nope :],
            g=matrix("g_proj") if config.output_gate else None,
            o=matrix("o_proj"),
        )

    def indexer(self, layer: int) -> IndexerWeights | None:
        base = f"{ROOT}layers.{layer}.self_attn.indexer."
        if not self.has(f"{base}wk.weight"):
            return None
        bias = f"{base}k_norm.bias"
        return IndexerWeights(
            wq_b=self.tensor(f"{base}wq_b.weight"),
            wk=self.tensor(f"{base}wk.weight"),
            weights=self.tensor(f"{base}weights_proj.weight"),
            k_norm=self.tensor(f"{base}k_norm.weight").float(),
            k_bias=self.tensor(bias).float() if self.has(bias) else None,
        )

    def dense(self, layer: int) -> MlpWeights:
        return self._mlp(f"{ROOT}layers.{layer}.mlp")

    def moe(self, layer: int) -> MoeWeights:
        base = f"{ROOT}layers.{layer}.block_sparse_moe."
        config = self.config.moe
        bias = f"{base}gate.e_score_correction_bias"
        return MoeWeights(
            router=self.tensor(f"{base}gate.weight").float(),
            bias=self.tensor(bias) if self.has(bias) else None,
            down=self.tensor(f"{base}routed_expert_down_proj.weight"),
            up=self.tensor(f"{base}routed_expert_up_proj.weight"),
            norm=self.tensor(f"{base}routed_expert_norm.weight").float() if config.latent_norm else None,
            shared=self._mlp(f"{base}shared_experts") if config.shared else None,
        )

    def embedding(self, ids: Tensor) -> Tensor:
        return self.rows(f"{ROOT}embed_tokens.weight", ids).float()

    def head(self) -> HeadWeights:
        score, norm = self.head_vectors()
        return HeadWeights(score, norm, self.tensor(self._output_name()))

    def head_vectors(self) -> tuple[Tensor, Tensor]:
        return self._score(f"{ROOT}output_attn_res"), self.tensor(f"{ROOT}norm.weight").float()

    def output_rows(self, begin: int, end: int) -> Tensor:
        return self.tensor(self._output_name())[begin:end]

    def stored(self) -> Iterable[tuple[str, int]]:
        return ()

    def close(self) -> None:
        return

    def _output_name(self) -> str:
        return f"{ROOT}embed_tokens.weight" if self.config.tie_embeddings else OUTPUT


def check_weights(values: npt.NDArray[np.float32], what: str) -> None:
    """Refuse weights that are NaN or infinite: one in a router's bias misroutes tokens and leaves all logits finite.

    Raises:
        InputError: names ``what``.
    """
    # The sum passes on what is not finite; only where it is not, can it also be an overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        total = values.sum()
    if not np.isfinite(total) and not np.isfinite(values).all():
        raise InputError(f"{what} holds values that are NaN or infinite", "verify the file against its source")
