"""A whole model run layer by layer: each layer is built, run and dropped, so memory holds one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kimi_gguf.reference.attn_res import Stream, mix
from kimi_gguf.reference.layer import LayerCache, Trace, build_layer
from kimi_gguf.reference.ops import linear, rms_norm
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.weights import WeightStore

Observer = Callable[[int, Stream, Trace], None]


@dataclass(slots=True)
class ModelCache:
    """State of running sequences: one ``LayerCache`` per layer."""

    layers: list[LayerCache] = field(default_factory=list)


def hidden_states(
    store: WeightStore,
    ids: Tensor,
    options: Options,
    *,
    cache: ModelCache | None = None,
    observe: Observer | None = None,
) -> Tensor:
    """The states [B, T, d] in front of the output matrix, for token ids [B, T].

    Args:
        cache: continues the sequences that it holds, and is updated in place.
        observe: called after each layer with its index, the stream after it and its trace.
    """
    config = store.config
    if cache is not None and not cache.layers:
        cache.layers = [LayerCache() for _ in range(config.n_layers)]
    stream = Stream(store.embedding(ids))
    for index in range(config.n_layers):
        layer = build_layer(store, config, index, options)
        stream, trace = layer.forward(stream, None if cache is None else cache.layers[index])
        if observe is not None:
            observe(index, stream, trace)
    head = store.head()
    mixed = mix(stream.blocks, stream.residual, head.score, config.rms_norm_eps)
    return rms_norm(mixed, head.norm, config.rms_norm_eps)


def logits(
    store: WeightStore,
    ids: Tensor,
    options: Options,
    *,
    cache: ModelCache | None = None,
    observe: Observer | None = None,
) -> Tensor:
    """Next-token logits [B, T, V]; arguments as ``hidden_states``."""
    states = hidden_states(store, ids, options, cache=cache, observe=observe)
    return linear(states, store.head().output)
