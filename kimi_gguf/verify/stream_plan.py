"""What a streamed run will need, told before it starts: memory, disk, bytes to read, floating-point operations, time.

Sizes follow from the model's shapes. Only the two rates that turn them into time are measured, on one attention layer
and one expert of the very files, and on a small matrix product.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from typing import Any

import torch

from convert.config import ModelConfig
from convert.tensor_table import LAYER_TABLE, TableRow, dimensions, layer_traits, shapes
from kimi_gguf.reference.kda import CHUNK
from kimi_gguf.reference.weights import WeightStore
from kimi_gguf.verify.observations import TokenSet
from quant.errors import UsageError
from quant.tensors import TensorClass

_MB = 1 << 20
_PROCESS_BYTES = 700 * _MB
_LEAST_WORK = 32 * _MB
_MOST_WORK = 2048 * _MB
_SLICE_TOKENS = 4096
OUTPUT_ROWS = 8192
_NO_PRODUCT = (TensorClass.NORM, TensorClass.KDA_CONV, TensorClass.KDA_STATE, TensorClass.RESIDUAL_SCORE)
_EXPERT = re.compile(r"_exps\.|\.experts\.")
_LAYER = re.compile(r"(?:blk|layers)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a run is cut so that it stays within its memory.

    Attributes:
        memory: bytes allowed.
        work_bytes: of a large temporary.
        mix_tokens, slice_tokens, segment_tokens, output_tokens: tokens at a time in attention residuals, in the dense
            parts of a layer, in its experts, and in front of the output matrix.
        chunks_together: chunks at a time in attention.
        state_bytes: hidden states and decisions of all models; state_in_memory: whether they stay there.
        needed: bytes of memory that this plan expects at most.
    """

    memory: int
    work_bytes: int
    mix_tokens: int
    slice_tokens: int
    segment_tokens: int
    output_tokens: int
    chunks_together: int
    state_bytes: int
    state_in_memory: bool
    needed: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will cost.

    Attributes:
        read_bytes: of weights, all models; an expert counts with the chance that some token chooses it.
        flops: multiplications and additions.
        state_bytes: on disk, 0 when hidden states stay in memory.
        memory_bytes: expected at most.
        read_rate, flop_rate: measured, per second.
        seconds: reading and computing one after the other.
    """

    read_bytes: int
    flops: float
    state_bytes: int
    memory_bytes: int
    read_rate: float
    flop_rate: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """The forecast for people."""
        disk = f", {self.state_bytes / 1e9:.3g} GB of scratch disk" if self.state_bytes else ""
        return (
            f"forecast: {self.read_bytes / 1e9:,.3g} GB to read at {self.read_rate / 1e6:,.0f} MB/s, "
            f"{self.flops / 1e12:,.3g} TFLOP at {self.flop_rate / 1e9:,.0f} GFLOP/s, "
            f"{self.memory_bytes / 1e9:.3g} GB of memory{disk}: about {human_time(self.seconds)}"
        )


def human_time(seconds: float) -> str:
    """``42 s``, ``12 min``, ``3.4 h``, ``2.1 days``."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def layer_rows(config: ModelConfig, layer: int) -> list[tuple[TableRow, tuple[int, ...]]]:
    """The tensors of a layer with their GGUF shapes."""
    traits, sizes = layer_traits(config, layer), dimensions(config)
    return [(row, shapes(row.shape, sizes)[0]) for row in LAYER_TABLE if row.trait in traits]


def _loaded_bytes(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Float32 bytes of a layer's attention, and of its FFN without routed experts."""
    attention = ffn = 0
    for row, shape in layer_rows(config, layer):
        if row.cls is TensorClass.ROUTED_EXPERT:
            continue
        if row.name.startswith(("ffn_", "exp_probs")):
            ffn += 4 * prod(shape)
        else:
            attention += 4 * prod(shape)
    return attention, ffn


def plan_memory(config: ModelConfig, tokens: TokenSet, memory: int, *, lanes: int, on_disk: bool) -> MemoryPlan:
    """Cut a run of ``lanes`` models so that it stays within ``memory`` bytes.

    Args:
        on_disk: keep hidden states on disk even where they would fit.

    Raises:
        UsageError: the memory does not hold one layer, one expert and one chunk.
    """
    d, moe, n = config.hidden, config.moe, tokens.tokens
    context = tokens.longest
    values = ceil(config.n_layers / config.attn_res_block) + 1
    weights = max(max(_loaded_bytes(config, layer)) for layer in range(config.n_layers))
    expert = 3 * 4 * moe.width * moe.latent
    fixed = _PROCESS_BYTES + weights + 3 * expert
    state = lanes * n * (4 * d * (values + 1) + 8 * moe.used + 4 * moe.experts + ceil(context / 4))
    in_memory = not on_disk and state <= memory // 4
    free = memory - fixed - (state if in_memory else 0)
    # Per token of a group of chunks: input, output and gates of attention, queries, and the sums of all heads.
    wide = max(config.kda.heads * config.kda.head_dim, config.mla.heads * (config.mla.nope + config.mla.rope))
    per_token = 4 * (4 * d + 5 * wide)
    group = context * per_token
    least = fixed + 2 * group + 8 * _LEAST_WORK
    if free < 2 * group + 8 * _LEAST_WORK:
        raise UsageError(
            f"--memory {memory / 1e9:.3g} GB is too little: one layer, one expert and one chunk of {context}"
            f" tokens take {least / 1e9:.3g} GB",
            "give more --memory, or a shorter --context",
        )
    work = max(_LEAST_WORK, min(_MOST_WORK, (free - 2 * group) // 8))
    ffn_width = max(config.ffn_dense, moe.width * max(moe.shared, 1))
    per_slice = 4 * (6 * d + 4 * ffn_width + 4 * moe.experts)
    together = max(1, min(_SLICE_TOKENS // context, (free // 4) // group))
    plan = MemoryPlan(
        memory=memory,
        work_bytes=work,
        mix_tokens=max(1, min(_SLICE_TOKENS, work // (4 * d * 3 * values))),
        slice_tokens=max(1, min(_SLICE_TOKENS, work // per_slice)),
        segment_tokens=max(1, min(n, (free // 2) // (8 * moe.latent + 32 * moe.used))),
        output_tokens=max(1, min(n, _SLICE_TOKENS, (free // 2) // (4 * config.vocab_size * lanes))),
        chunks_together=together,
        state_bytes=state,
        state_in_memory=in_memory,
        needed=0,
    )
    return replace(
        plan, needed=min(memory, fixed + _largest(plan, config, tokens, lanes) + (state if in_memory else 0))
    )


def _largest(plan: MemoryPlan, config: ModelConfig, tokens: TokenSet, lanes: int) -> int:
    """Bytes of the largest temporaries: of attention, of the experts, or in front of the output matrix."""
    moe, kda, mla = config.moe, config.kda, config.mla
    context = tokens.longest
    group = min(plan.chunks_together * tokens.context, tokens.tokens)
    wide = max(kda.heads * kda.head_dim, mla.heads * (mla.nope + mla.rope))
    heads = max(kda.heads * kda.head_dim * 4 * (12 + 4 * CHUNK), mla.heads * context * 12)
    attention = group * 4 * (4 * config.hidden + 5 * wide) + min(plan.work_bytes, group * heads)
    segment = min(plan.segment_tokens, tokens.tokens)
    ffn = max(config.ffn_dense, moe.width * max(moe.shared, 1))
    slices = min(plan.work_bytes, min(plan.slice_tokens, tokens.tokens) * 4 * (6 * config.hidden + 4 * ffn))
    experts = segment * (8 * moe.latent + 32 * moe.used) + slices
    output = min(plan.output_tokens, tokens.tokens) * 4 * config.vocab_size * lanes
    return max(attention, experts, output + OUTPUT_ROWS * 4 * config.hidden)


def run_flops(config: ModelConfig, tokens: TokenSet) -> float:
    """Multiplications and additions of one model over all tokens."""
    per_token = 2.0 * config.vocab_size * config.hidden
    mla, kda = config.mla, config.kda
    mean_keys = (min(tokens.context, tokens.tokens) + 1) / 2
    for layer in range(config.n_layers):
        for row, shape in layer_rows(config, layer):
            if row.cls in _NO_PRODUCT or len(shape) < 2:
                continue
            share = config.moe.used / config.moe.experts if row.cls is TensorClass.ROUTED_EXPERT else 1.0
            per_token += 2.0 * share * prod(shape)
        if config.layer_kinds[layer] == "mla":
            per_token += 2.0 * mean_keys * mla.heads * (mla.nope + mla.rope + mla.v)
            if config.dsa is not None and layer in config.dsa.layers:
                per_token += 2.0 * mean_keys * config.dsa.heads * config.dsa.head_dim
        else:
            # State update and read-out, and the pairs inside a chunk of 16.
            per_token += 8.0 * kda.heads * kda.head_dim * (kda.head_dim + 16)
    return per_token * tokens.tokens


def run_bytes(store: WeightStore, tokens: TokenSet, plan: MemoryPlan) -> int:
    """Bytes of weights that one model's run reads."""
    config = store.config
    segments = ceil(tokens.tokens / plan.segment_tokens)
    inside = min(plan.segment_tokens, tokens.tokens)
    chosen = 1 - (1 - config.moe.used / config.moe.experts) ** inside
    outputs = ceil(tokens.tokens / plan.output_tokens)
    total = 0.0
    for name, nbytes in store.stored():
        if _EXPERT.search(name):
            total += nbytes * chosen * segments
        elif _LAYER.search(name):
            total += nbytes
        elif name.startswith("output.") or "lm_head" in name:
            total += nbytes * outputs
    return int(total)


def measure_rates(store: WeightStore, device: torch.device) -> tuple[float, float]:
    """Bytes per second of reading and decoding weights, and float32 operations per second of a matrix product."""
    config = store.config
    sizes = dict(store.stored())
    layer = config.dense_layers if config.dense_layers < config.n_layers else 0
    begin = time.perf_counter()
    if config.layer_kinds[layer] == "kda":
        store.kda(layer)
    else:
        store.mla(layer)
    read = sum(size for name, size in sizes.items() if _in_attention(name, layer))
    if layer >= config.dense_layers:
        store.expert(layer, 0)
        stacked = sum(size for name, size in sizes.items() if _EXPERT.search(name) and _is_layer(name, layer))
        read += stacked // config.moe.experts
    reading = time.perf_counter() - begin
    a = torch.randn(1024, 1024, device=device)
    _ = (a @ a).sum().item()
    begin = time.perf_counter()
    _ = (a @ a @ a).sum().item()
    return read / max(reading, 1e-9), 2 * 2 * 1024**3 / max(time.perf_counter() - begin, 1e-9)


def _is_layer(name: str, layer: int) -> bool:
    found = _LAYER.search(name)
    return found is not None and int(found[1]) == layer


def _in_attention(name: str, layer: int) -> bool:
    return _is_layer(name, layer) and bool(re.search(r"self_attn\.|\.(attn|ssm)_(?!norm|res)", name))


def forecast(stores: Sequence[WeightStore], tokens: TokenSet, plan: MemoryPlan, device: torch.device) -> Forecast:
    """What a run of these models over ``tokens`` will cost."""
    read = sum(run_bytes(store, tokens, plan) for store in stores)
    flops = sum(run_flops(store.config, tokens) for store in stores)
    rates = [measure_rates(store, device) for store in stores]
    read_rate, flop_rate = min(r for r, _ in rates), min(f for _, f in rates)
    disk = 0 if plan.state_in_memory else plan.state_bytes
    seconds = read / read_rate + flops / flop_rate
    return Forecast(read, flops, disk, plan.needed, read_rate, flop_rate, seconds)
