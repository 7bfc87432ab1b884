"""Runs layers of the released K3.1 Pro's true shapes in the float32 reference, and shows time and peak memory.

    python scripts/show_real_layer.py [--tokens 8]

Layer 1 is KDA, layer 3 MLA with an indexer; both have 896 experts of 3584 x 3072. Weights are made up as they are
asked for, like those of a checkpoint, so that no file of 17 GB is needed and memory is the reference's own.
The indexer keeps 4 keys, so that a few tokens are enough to see it choose.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from convert.config import ModelConfig
from convert.shapes import released_config, text_sources
from kimi_gguf.reference.attn_res import Stream
from kimi_gguf.reference.layer import build_layer
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.situ import MlpWeights
from kimi_gguf.reference.weights import CheckpointNamedStore, expert_prefix

LAYERS = (1, 3)
TOP_K = 4
LIMIT_GIB = 20


class MadeUpStore(CheckpointNamedStore):
    """Normal weights with fan-in scale, a function of the tensor's name alone; norms are ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.shapes = {source.name: source.shape for source in text_sources(config)}

    def tensor(self, name: str) -> Tensor:
        return self.make(name, self.shapes[name])

    def make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and "norm" in name:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self.make(name, (*ids.shape, self.config.hidden))

    def expert(self, layer: int, expert: int) -> MlpWeights:
        prefix = expert_prefix(layer, expert)
        inner, outer = (self.config.moe.width, self.config.moe.latent), (self.config.moe.latent, self.config.moe.width)
        return MlpWeights(
            self.make(f"{prefix}w1", inner), self.make(f"{prefix}w3", inner), self.make(f"{prefix}w2", outer)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    config = released_config("k3.1-pro")
    assert config.dsa is not None
    config = replace(config, dsa=replace(config.dsa, top_k=TOP_K))
    store = MadeUpStore(config)
    stream = Stream(torch.randn(1, args.tokens, config.hidden, generator=torch.Generator().manual_seed(0)))
    stream.blocks.append(torch.randn(stream.residual.shape, generator=torch.Generator().manual_seed(1)))
    for index in LAYERS:
        began = time.monotonic()
        with torch.inference_mode():
            layer = build_layer(store, config, index, Options())
            built = time.monotonic()
            stream, trace = layer.forward(stream)
        del layer
        assert trace.routing is not None
        seconds = f"{built - began:.0f} s to build, {time.monotonic() - built:.0f} s to run"
        used = len(trace.routing.ids.unique())
        print(f"layer {index} ({config.layer_kinds[index]}): {seconds}, {used} of {config.moe.experts} experts loaded")
        if trace.selection is not None:
            print(f"  keys chosen by the last token: {trace.selection[0, -1].nonzero().flatten().tolist()}")
        if not bool(torch.isfinite(stream.residual).all()):
            raise SystemExit(f"layer {index}: the result is not finite")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.1f} GiB")
    if peak > LIMIT_GIB:
        raise SystemExit(f"more than {LIMIT_GIB} GiB")


if __name__ == "__main__":
    main()
