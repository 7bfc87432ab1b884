"""What several test modules share: a checkpoint of side files, and the released pattern at toy widths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from convert.config import ModelConfig


@dataclass
class Files:
    """A checkpoint of side files only."""

    files: dict[str, bytes] = field(default_factory=dict)

    def read_file(self, name: str) -> bytes | None:
        return self.files.get(name)


def small(config: ModelConfig) -> ModelConfig:
    """The released pattern of layers at five layers and toy widths."""
    return replace(
        config,
        n_layers=5,
        hidden=64,
        vocab_size=320,
        ffn_dense=96,
        layer_kinds=("kda", "kda", "kda", "mla", "mla"),
        kda=replace(config.kda, heads=2, head_dim=32),
        mla=replace(config.mla, heads=2, q_lora=64, kv_lora=32, nope=32, rope=16, v=32),
        moe=replace(config.moe, experts=6, used=2, width=32, latent=64),
        dsa=config.dsa and replace(config.dsa, heads=4, head_dim=32, layers=(3, 4)),
    )
