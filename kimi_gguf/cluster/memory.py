"""Bytes that a model takes while it runs in llama.cpp: weights, caches, KDA states, compute buffers.

Weights are those of the file. Caches follow llama.cpp's ``llama_memory_hybrid_idx``: an MLA layer stores its latent and
the shared key (no separate V), its indexer one key, both f16; a KDA layer stores, per sequence, one
``head_dim x head_dim`` matrix per head and the last inputs of three convolutions, in float32 whatever the cache's type.

Compute buffers are what the graph's intermediate values take at their worst moment. ``compute_bytes`` is an upper
bound with constants that were measured; ``docs/cluster.md`` states how closely it meets them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from convert.model_config import ModelConfig

F16, F32 = 2, 4
CELL_MULTIPLE = 256
"""llama.cpp rounds the context of a sequence up to this."""
PIPELINE_COPIES = 4
"""Copies of everything that enters a device, when several devices work on batches at once."""
HASHED_ABOVE = 10 << 20
"""A worker with a tensor cache is asked for tensors above this size by their hash."""
HASH_BYTES = 8

_LAYER = re.compile(r"blk\.(\d+)\.")
# Rows of ``hidden`` values per token that are alive beside a layer's own values: on the first device, on a later one
# when several batches are under way, and there for each checkpoint of the residual stream that comes from before.
_ROWS_FIRST, _ROWS_LATER, _ROWS_PER_CHECKPOINT = 16, 25, 8
# The same for the moment at which an MLA layer has chosen its keys.
_ROWS_FIRST_MLA, _ROWS_LATER_MLA = 6, 16


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Name and bytes of one tensor."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ModelBytes:
    """A model as its memory is counted.

    Attributes:
        config: sizes.
        tensors: of the file, in its order.
        label: the model in words.
    """

    config: ModelConfig
    tensors: tuple[TensorBytes, ...]
    label: str

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of each place: the layers, then what is behind the last one. The embedding has no place."""
        return self._by_place(lambda tensor: tensor.nbytes, sum)

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Bytes of the routed experts of each place."""
        return self._by_place(lambda tensor: tensor.nbytes if "_exps." in tensor.name else 0, sum)

    @cached_property
    def largest(self) -> tuple[int, ...]:
        """Bytes of the largest tensor of each place."""
        return self._by_place(lambda tensor: tensor.nbytes, max)

    @cached_property
    def unhashed(self) -> tuple[int, ...]:
        """Bytes of each place that are sent to a worker even when it has the model: small tensors, and hashes."""
        return self._by_place(lambda tensor: tensor.nbytes if tensor.nbytes <= HASHED_ABOVE else HASH_BYTES, sum)

    @cached_property
    def embedding(self) -> int:
        """Bytes of the token embedding, which stays with the head."""
        return sum(t.nbytes for t in self.tensors if _place_of(t.name, self.config.n_layers) is None)

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.weights) + self.embedding

    def _by_place(self, size: Callable[[TensorBytes], int], gather: Callable[[Iterable[int]], int]) -> tuple[int, ...]:
        sizes: list[list[int]] = [[0] for _ in range(self.config.n_layers + 1)]
        for tensor in self.tensors:
            place = _place_of(tensor.name, self.config.n_layers)
            if place is not None:
                sizes[place].append(size(tensor))
        return tuple(gather(each) for each in sizes)


def _place_of(name: str, n_layers: int) -> int | None:
    if name.startswith("token_embd."):
        return None
    match = _LAYER.match(name)
    return int(match[1]) if match else n_layers


@dataclass(frozen=True, slots=True)
class Load:
    """What a model is loaded for.

    Attributes:
        context: tokens of one sequence.
        parallel: sequences at once; each has a context of its own.
        ubatch: tokens of one graph.
    """

    context: int
    parallel: int = 1
    ubatch: int = 512

    @property
    def cells(self) -> int:
        """Cells of one sequence's cache."""
        return -(-self.context // CELL_MULTIPLE) * CELL_MULTIPLE


def mla_bytes_per_token(config: ModelConfig) -> int:
    """MLA cache of one layer: latent and shared key, f16."""
    return F16 * (config.mla.kv_lora + config.mla.rope)


def indexer_bytes_per_token(config: ModelConfig) -> int:
    """Indexer cache of one layer that has an indexer, f16; 0 for K3."""
    return 0 if config.dsa is None else F16 * config.dsa.head_dim


def state_bytes(config: ModelConfig) -> int:
    """KDA state of one layer and one sequence: a matrix per head, and K - 1 inputs of each of three convolutions."""
    kda = config.kda
    return F32 * (kda.heads * kda.head_dim**2 + 3 * (kda.conv_kernel - 1) * kda.heads * kda.head_dim)


def layer_caches(config: ModelConfig, layer: int, load: Load) -> tuple[int, int, int]:
    """Bytes of one layer's MLA cache, indexer cache and KDA states, over all sequences."""
    if config.layer_kinds[layer] == "kda":
        return 0, 0, state_bytes(config) * load.parallel
    tokens = load.cells * load.parallel
    has_indexer = config.dsa is not None and layer in config.dsa.layers
    return mla_bytes_per_token(config) * tokens, indexer_bytes_per_token(config) * tokens if has_indexer else 0, 0


def compute_bytes(config: ModelConfig, load: Load, begin: int, *, first: bool, copies: int) -> int:
    """An upper bound of a device's compute buffer, with flash attention on.

    Two moments can be the worst. In a routed FFN, gate, up and product of all used experts are alive. Where an indexer
    has scored the whole cache, its float32 scores [cells x ubatch] are. At both, the f16 mask [cells x ubatch] and
    what came from the device before exist ``copies`` times: the residual stream, and its checkpoint every
    ``attn_res_block`` layers.

    Args:
        begin: first layer of the device.
        first: no device comes before it.
        copies: 1, or ``PIPELINE_COPIES``.
    """
    moe, mla = config.moe, config.mla
    square = load.cells * load.ubatch
    piped = copies > 1 and not first
    checkpoints = 0 if first else -(-begin // config.attn_res_block)
    carried = checkpoints * (_ROWS_PER_CHECKPOINT if piped else 1)
    experts = F32 * moe.used * (3 * moe.width + moe.latent)
    queries = 4 * F32 * mla.heads * (mla.kv_lora + mla.rope)
    row = F32 * config.hidden
    ffn = load.ubatch * (experts + row * (carried + (_ROWS_LATER if piped else _ROWS_FIRST))) + F16 * copies * square
    choice = load.ubatch * (queries + row * (carried + (_ROWS_LATER_MLA if piped else _ROWS_FIRST_MLA)))
    scores = F32 * square if config.dsa is not None else 0
    logits = load.ubatch * F32 * config.vocab_size + F16 * copies * square + load.ubatch * row * (carried + _ROWS_FIRST)
    return max(ffn, choice + F16 * copies * square + scores, logits) + 2 * load.parallel * state_bytes(config)


def output_bytes(config: ModelConfig, load: Load) -> int:
    """The head's copy of the logits, one row for every sequence."""
    return load.parallel * F32 * config.vocab_size


def head_compute_bytes(config: ModelConfig, load: Load, *, copies: int) -> int:
    """Buffers of a head without layers: embedded tokens, the mask, logits. One with layers has ``compute_bytes``."""
    square = load.cells * load.ubatch
    rows = load.ubatch * F32 * config.hidden * (1 + copies)
    return rows + F16 * copies * square + output_bytes(config, load)
