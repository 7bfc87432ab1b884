"""The released models without their files: configs, checkpoint tensors and GGUF tensors of K3 and K3.1 Pro.

Half a million expert tensors differ only in their index, so they are held as patterns with a count.
Sizes are those of the public K3 checkpoint; K3.1 Pro adds the indexer of its 24 MLA layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from convert.config import DsaConfig, KdaConfig, LayerKind, MlaConfig, ModelConfig, MoeConfig
from convert.domain import TensorSpec
from convert.layout import TEXT_PREFIX
from convert.tensor_table import GLOBAL_TABLE, LAYER_TABLE, TableRow, dimensions, layer_traits, shapes
from quant.errors import UsageError

SHAPES = ("k3", "k3.1-pro")

_N_LAYERS = 93
_MLA_LAYERS = (*range(3, _N_LAYERS, 4), _N_LAYERS - 1)
_DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
_F32_SOURCES = ("_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias")
_VISION_BLOCKS = 27
_VISION_BLOCK_TENSORS = (
    ("norm0.weight", (1024,)),
    ("norm1.weight", (1024,)),
    ("wqkv.weight", (4608, 1024)),
    ("wo.weight", (1024, 1536)),
    ("mlp.fc0.weight", (4096, 1024)),
    ("mlp.fc1.weight", (1024, 4096)),
)
_VISION_GLOBALS = (
    ("mm_projector.proj.0.weight", (4096, 4096)),
    ("mm_projector.proj.2.weight", (7168, 4096)),
    ("mm_projector.post_norm.weight", (7168,)),
    ("vision_tower.patch_embed.proj.weight", (1024, 3, 14, 14)),
    ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1024)),
    ("vision_tower.encoder.final_layernorm.weight", (1024,)),
)


@dataclass(frozen=True, slots=True)
class SourcePattern:
    """Checkpoint tensors that differ only in the expert index, ``{e}`` in ``name``; ``count`` is 1 for the others."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all ``count`` tensors."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype] * self.count


def released_config(shape: str) -> ModelConfig:
    """The config of a released model, ``k3`` or ``k3.1-pro``.

    Raises:
        UsageError: another name; the message lists the names.
    """
    name = shape.lower()
    if name not in SHAPES:
        raise UsageError(f"unknown shape {shape!r}", f"known shapes: {', '.join(SHAPES)}")
    kinds: tuple[LayerKind, ...] = tuple("mla" if layer in _MLA_LAYERS else "kda" for layer in range(_N_LAYERS))
    k3 = ModelConfig(
        arch="kimi-k3",
        n_layers=_N_LAYERS,
        hidden=7168,
        vocab_size=163840,
        context_length=1048576,
        rms_norm_eps=1e-5,
        layer_kinds=kinds,
        dense_layers=1,
        ffn_dense=33792,
        kda=KdaConfig(heads=96, head_dim=128, conv_kernel=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MlaConfig(heads=96, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128, output_gate=True),
        moe=MoeConfig(
            experts=896,
            used=16,
            shared=2,
            width=3072,
            latent=3584,
            latent_norm=True,
            renormalize=True,
            scaling=1.0,
            gating="sigmoid",
            groups=1,
            groups_used=1,
        ),
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attn_res_block=12,
        dsa=None,
        bos=163584,
        eos=163586,
        pad=163839,
        tie_embeddings=False,
    )
    if name == "k3":
        return k3
    return replace(k3, arch="kimi-k31", dsa=DsaConfig(heads=32, head_dim=128, top_k=2048, layers=_MLA_LAYERS))


def text_sources(config: ModelConfig) -> tuple[SourcePattern, ...]:
    """The text model's checkpoint tensors in the released format: MXFP4 experts, F32 and BF16 for the rest."""
    sizes = dimensions(config)
    patterns: dict[str, SourcePattern] = {}
    for row, layer in _rows(config):
        for source, symbols in row.sources:
            name, shape = _source_name(source, layer), shapes(symbols, sizes)[0]
            if row.transform == "experts":
                for leaf, per_byte in (("packed", 2), ("scale", 32)):
                    packed = SourcePattern(f"{name}_{leaf}", "U8", (shape[0], shape[1] // per_byte), config.moe.experts)
                    patterns[packed.name] = packed
            else:
                patterns[name] = SourcePattern(name, _dtype(name), shape)
    return tuple(patterns.values())


def vision_sources() -> tuple[SourcePattern, ...]:
    """The vision tensors of the released checkpoints, which no text GGUF holds."""
    blocks = [
        SourcePattern(f"vision_tower.encoder.blocks.{block}.{name}", "BF16", shape)
        for block in range(_VISION_BLOCKS)
        for name, shape in _VISION_BLOCK_TENSORS
    ]
    return (*(SourcePattern(name, "BF16", shape) for name, shape in _VISION_GLOBALS), *blocks)


def released_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The GGUF tensors that ``build_layout`` makes of a checkpoint in the released format, from the config alone."""
    sizes = dimensions(config)
    return tuple(_spec(row, layer, config, shapes(row.shape, sizes)[0]) for row, layer in _rows(config))


def _rows(config: ModelConfig) -> Iterator[tuple[TableRow, int | None]]:
    for layer in range(config.n_layers):
        traits = layer_traits(config, layer)
        yield from ((row, layer) for row in LAYER_TABLE if row.trait in traits)
    wanted = {"all", "tied" if config.tie_embeddings else "untied"}
    yield from ((row, None) for row in GLOBAL_TABLE if row.trait in wanted)


def _spec(row: TableRow, layer: int | None, config: ModelConfig, shape: tuple[int, ...]) -> TensorSpec:
    name = row.name if layer is None else f"blk.{layer}.{row.name}"
    sources = tuple(_source_name(source, layer) for source, _ in row.sources)
    if row.transform == "experts":
        packed = (f"{sources[0]}_packed", f"{sources[0]}_scale")
        return TensorSpec(name, shape, row.cls, layer, packed, "packed_experts", "MXFP4", config.moe.experts)
    moved = row.transform in ("copy", "head_keys", "head_values")
    return TensorSpec(name, shape, row.cls, layer, sources, row.transform, _dtype(sources[0]) if moved else "F32")


def _source_name(source: str, layer: int | None) -> str:
    return f"{TEXT_PREFIX}{source}" if layer is None else f"{TEXT_PREFIX}model.layers.{layer}.{source}"


def _dtype(name: str) -> str:
    return "F32" if name.endswith(_F32_SOURCES) else "BF16"
