"""The tensors of a Kimi K3 / K3.1 checkpoint: names, dtypes and shapes as released, with random values.

All matrices are [out, in]. Spreads are 1 / sqrt(in), so that activations keep their size from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Literal

import numpy as np

from kimi_gguf.reference.checkpoint_shape import TinyShape
from kimi_gguf.reference.checkpoint_values import gaussian, generator, mxfp4_packed, mxfp4_scales
from kimi_gguf.reference.checkpoint_writer import Array, LazyTensor
from quant.mxfp4 import decode
from quant.tensors import F32Array, Mxfp4Rows

_HEAD_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """How tensors are filled.

    Attributes:
        seed: of all values.
        experts: packed as released, or their exact values as plain BF16 matrices.
        a_log_padding: value of the unused tail of ``A_log`` (zero in the release).
        indexer_dtype: of ``weights_proj`` and ``k_norm``.
        scale_dtype: of the E8M0 scales.
    """

    seed: int = 0
    experts: Literal["mxfp4", "bf16"] = "mxfp4"
    a_log_padding: float = 0.0
    indexer_dtype: Literal["BF16", "F32"] = "BF16"
    scale_dtype: Literal["U8", "F8_E8M0"] = "U8"


class _Maker:
    """Shorthands for the tables below."""

    def __init__(self, options: TensorOptions) -> None:
        self.options = options

    def normal(
        self, name: str, shape: tuple[int, ...], *, dtype: str = "BF16", std: float | None = None, mean: float = 0.0
    ) -> LazyTensor:
        spread = 1 / sqrt(prod(shape[1:])) if std is None else std

        def make() -> Array:
            return gaussian(generator(self.options.seed, name), shape, spread, mean)

        return LazyTensor(name, dtype, shape, make)

    def norm(self, name: str, width: int, *, dtype: str = "BF16") -> LazyTensor:
        return self.normal(name, (width,), dtype=dtype, std=0.1, mean=1.0)

    def expert(self, stem: str, rows: int, columns: int) -> Iterator[LazyTensor]:
        seed = self.options.seed
        packed = partial(mxfp4_packed, seed, stem, rows, columns)
        scales = partial(mxfp4_scales, seed, stem, rows, columns)
        if self.options.experts == "mxfp4":
            yield LazyTensor(f"{stem}.weight_packed", "U8", (rows, columns // 2), packed)
            yield LazyTensor(f"{stem}.weight_scale", self.options.scale_dtype, (rows, columns // 32), scales)
        else:
            yield LazyTensor(f"{stem}.weight", "BF16", (rows, columns), _decoded(packed, scales))


def _decoded(packed: Callable[[], Array], scales: Callable[[], Array]) -> Callable[[], Array]:
    """MXFP4 values, each of which BF16 holds exactly."""
    return lambda: decode(Mxfp4Rows(packed(), scales()))


def _kda(make: _Maker, prefix: str, shape: TinyShape) -> Iterator[LazyTensor]:
    hidden, heads, width = shape.hidden, shape.kda_heads, shape.kda_head_dim
    inner = heads * width
    for part in "qkv":
        yield make.normal(f"{prefix}{part}_proj.weight", (inner, hidden))
        yield make.normal(f"{prefix}{part}_conv1d.weight", (inner, 1, shape.conv_kernel), dtype="F32", std=0.5)
    yield make.normal(f"{prefix}f_a_proj.weight", (width, hidden))
    yield make.normal(f"{prefix}f_b_proj.weight", (inner, width))
    yield make.normal(f"{prefix}b_proj.weight", (heads, hidden))
    name, padded = f"{prefix}A_log", -(-heads // _HEAD_MULTIPLE) * _HEAD_MULTIPLE

    def a_log() -> F32Array:
        values = np.full(padded, make.options.a_log_padding, dtype=np.float32)
        values[:heads] = gaussian(generator(make.options.seed, name), (heads,), 0.5)
        return values

    yield LazyTensor(name, "F32", (padded,), a_log)
    yield make.normal(f"{prefix}dt_bias", (inner,), dtype="F32", std=1.0, mean=-2.0)
    yield make.normal(f"{prefix}g_proj.weight", (inner, hidden))
    yield make.norm(f"{prefix}o_norm.weight", width, dtype="F32")
    yield make.normal(f"{prefix}o_proj.weight", (hidden, inner))


def _mla(make: _Maker, prefix: str, shape: TinyShape) -> Iterator[LazyTensor]:
    hidden, heads, q_lora, kv_lora = shape.hidden, shape.heads, shape.q_lora, shape.kv_lora
    yield make.normal(f"{prefix}q_a_proj.weight", (q_lora, hidden))
    yield make.norm(f"{prefix}q_a_layernorm.weight", q_lora)
    yield make.normal(f"{prefix}q_b_proj.weight", (heads * (shape.nope + shape.rope), q_lora))
    yield make.normal(f"{prefix}kv_a_proj_with_mqa.weight", (kv_lora + shape.rope, hidden))
    yield make.norm(f"{prefix}kv_a_layernorm.weight", kv_lora)
    yield make.normal(f"{prefix}kv_b_proj.weight", (heads * (shape.nope + shape.v), kv_lora))
    yield make.normal(f"{prefix}g_proj.weight", (heads * shape.v, hidden))
    yield make.normal(f"{prefix}o_proj.weight", (hidden, heads * shape.v))
    if shape.k31:
        dtype, width = make.options.indexer_dtype, shape.index_head_dim
        yield make.normal(f"{prefix}indexer.wq_b.weight", (shape.index_heads * width, q_lora))
        yield make.normal(f"{prefix}indexer.wk.weight", (width, hidden))
        yield make.normal(f"{prefix}indexer.weights_proj.weight", (shape.index_heads, hidden), dtype=dtype)
        yield make.norm(f"{prefix}indexer.k_norm.weight", width, dtype=dtype)
        yield make.normal(f"{prefix}indexer.k_norm.bias", (width,), dtype=dtype, std=0.1)


def _feed_forward(make: _Maker, prefix: str, hidden: int, width: int) -> Iterator[LazyTensor]:
    yield make.normal(f"{prefix}gate_proj.weight", (width, hidden))
    yield make.normal(f"{prefix}up_proj.weight", (width, hidden))
    yield make.normal(f"{prefix}down_proj.weight", (hidden, width))


def _moe(make: _Maker, prefix: str, shape: TinyShape) -> Iterator[LazyTensor]:
    hidden, latent, width = shape.hidden, shape.latent, shape.expert_width
    yield make.normal(f"{prefix}gate.weight", (shape.experts, hidden))
    yield make.normal(f"{prefix}gate.e_score_correction_bias", (shape.experts,), dtype="F32", std=0.1)
    yield make.normal(f"{prefix}routed_expert_down_proj.weight", (latent, hidden))
    yield make.normal(f"{prefix}routed_expert_up_proj.weight", (hidden, latent))
    yield make.norm(f"{prefix}routed_expert_norm.weight", latent)
    yield from _feed_forward(make, f"{prefix}shared_experts.", hidden, shape.shared * width)
    for e in range(shape.experts):
        yield from make.expert(f"{prefix}experts.{e}.w1", width, latent)
        yield from make.expert(f"{prefix}experts.{e}.w2", latent, width)
        yield from make.expert(f"{prefix}experts.{e}.w3", width, latent)


def _residual(make: _Maker, stem: str, hidden: int) -> Iterator[LazyTensor]:
    yield make.norm(f"{stem}_norm.weight", hidden)
    yield make.normal(f"{stem}_proj.weight", (1, hidden))


def _vision(make: _Maker, shape: TinyShape) -> Iterator[LazyTensor]:
    hidden, qkv, width = shape.vision_hidden, shape.vision_qkv, shape.vision_width
    merged = 4 * hidden
    yield make.normal("mm_projector.proj.0.weight", (merged, merged))
    yield make.normal("mm_projector.proj.2.weight", (shape.hidden, merged))
    yield make.norm("mm_projector.post_norm.weight", shape.hidden)
    yield make.normal("vision_tower.patch_embed.proj.weight", (hidden, 3, 14, 14))
    yield make.normal(
        "vision_tower.patch_embed.pos_emb.weight", (shape.vision_grid, shape.vision_grid, hidden), std=0.02
    )
    for b in range(shape.vision_layers):
        block = f"vision_tower.encoder.blocks.{b}."
        yield make.norm(f"{block}norm0.weight", hidden)
        yield make.norm(f"{block}norm1.weight", hidden)
        yield make.normal(f"{block}wqkv.weight", (3 * qkv, hidden))
        yield make.normal(f"{block}wo.weight", (hidden, qkv))
        yield make.normal(f"{block}mlp.fc0.weight", (width, hidden))
        yield make.normal(f"{block}mlp.fc1.weight", (hidden, width))
    yield make.norm("vision_tower.encoder.final_layernorm.weight", hidden)


def checkpoint_tensors(shape: TinyShape, options: TensorOptions | None = None) -> Iterator[LazyTensor]:
    """Every tensor of a checkpoint, layer by layer, then the globals, then vision; values are made on demand."""
    make = _Maker(options or TensorOptions())
    for i, kind in enumerate(shape.kinds):
        prefix = f"language_model.model.layers.{i}."
        yield make.norm(f"{prefix}input_layernorm.weight", shape.hidden)
        yield make.norm(f"{prefix}post_attention_layernorm.weight", shape.hidden)
        yield from _residual(make, f"{prefix}self_attention_res", shape.hidden)
        yield from _residual(make, f"{prefix}mlp_res", shape.hidden)
        yield from (_kda if kind == "kda" else _mla)(make, f"{prefix}self_attn.", shape)
        if i < shape.dense_layers:
            yield from _feed_forward(make, f"{prefix}mlp.", shape.hidden, shape.ffn_dense)
        else:
            yield from _moe(make, f"{prefix}block_sparse_moe.", shape)
    yield make.normal("language_model.model.embed_tokens.weight", (shape.vocab, shape.hidden), std=0.5)
    yield make.normal("language_model.lm_head.weight", (shape.vocab, shape.hidden))
    yield make.norm("language_model.model.norm.weight", shape.hidden)
    yield from _residual(make, "language_model.model.output_attn_res", shape.hidden)
    if shape.vision:
        yield from _vision(make, shape)
