"""Runs a GGUF in the patched llama.cpp and returns what a check needs: logits, routing, selections, hidden states.

llama.cpp runs in a child process (see ``llama_worker``): an abort there, of a lost RPC worker for example, is an
error here. Every request has a time limit.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from convert.structure import check_structure
from kimi_gguf.cluster.llama_child import Child
from kimi_gguf.cluster.llama_protocol import Array, Header
from kimi_gguf.cluster.rpc import ask_worker
from kimi_gguf.cluster.runtime import Runtime, find
from quant.errors import InputError, UsageError
from quant.gguf_split import read_gguf_set
from quant.tensors import F32Array, U8Array

I32Array = npt.NDArray[np.int32]
TokenIds = Sequence[int] | npt.NDArray[np.integer]
CacheType = Literal["f32", "f16", "bf16", "q8_0"]
Outputs = Literal["all", "last", "none"]
Trace = Literal["experts", "router", "selections", "hidden"]

# The last of these that a layer has holds the weights that its experts' outputs are multiplied with.
_WEIGHTS = ("ffn_moe_weights", "ffn_moe_weights_norm", "ffn_moe_weights_scaled")
_WATCH: dict[str, tuple[str, ...]] = {
    "experts": ("ffn_moe_topk", *_WEIGHTS),
    "router": ("ffn_moe_probs",),
    "selections": ("indexer_top_k",),
    "hidden": ("l_out",),
}
_ALL_LAYERS = 999


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is run.

    Attributes:
        n_ctx: cells of the cache; with several sequences and ``unified`` False they are shared out evenly.
        n_batch, n_ubatch: tokens per call, and per graph.
        n_seq: sequences that may run at once.
        unified: one cache for all sequences instead of one each.
        flash_attn: "on", "off" or "auto".
        cache_type: of K and V caches and the indexer's keys.
        threads: of the CPU backend; None takes the processors of this process.
        rpc: workers, ``host:port``; layers are shared out among them.
        tensor_split: share of the layers per device; None goes by free memory.
        gpu_layers: layers (the output counts as one) that go to GPUs and workers.
        repack: let the CPU backend rearrange quantized weights for speed.
        fused_indexer: use the indexer's single operation where the device has it.
        check_tensors: let llama.cpp look for invalid blocks while it loads.
        check_structure: compare the file with its architecture before loading.
        load_timeout: seconds without progress while loading.
        timeout: seconds that one call of ``decode`` may take.
    """

    n_ctx: int = 4096
    n_batch: int = 512
    n_ubatch: int = 512
    n_seq: int = 1
    unified: bool = True
    flash_attn: Literal["on", "off", "auto"] = "auto"
    cache_type: CacheType = "f16"
    threads: int | None = None
    rpc: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] = ()
    gpu_layers: int = _ALL_LAYERS
    repack: bool = True
    fused_indexer: bool = True
    check_tensors: bool = False
    check_structure: bool = True
    load_timeout: float = 600.0
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Facts of a loaded model: vocabulary size, layers, cells, tokens per call, and tokens that end generation."""

    vocab: int
    layers: int
    context: int
    batch: int
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What running n tokens gave.

    Attributes:
        logits: F32 [rows, vocabulary]; n rows, one, or none, as asked for.
        experts: per layer I32 [n, used], each token's experts by falling score.
        expert_weights: per layer F32 [n, used], in the same order.
        router_probs: per layer F32 [n, experts], the router's scores before the selection bias.
        selections: per layer, per token: sorted I32 positions that the indexer selected (itself and earlier ones).
        hidden: per layer F32 [n, d], the residual stream after the layer.
    """

    logits: F32Array
    experts: dict[int, I32Array] = field(default_factory=dict)
    expert_weights: dict[int, F32Array] = field(default_factory=dict)
    router_probs: dict[int, F32Array] = field(default_factory=dict)
    selections: dict[int, list[I32Array]] = field(default_factory=dict)
    hidden: dict[int, F32Array] = field(default_factory=dict)


def check_model(path: Path) -> None:
    """Compare a model file (or split set) with its architecture, tensor by tensor.

    llama.cpp itself names a missing tensor, but of an extra one says no more than that counts differ.

    Raises:
        InputError: unreadable, not kimi-k3 or kimi-k31, or something is missing, extra or misshapen; names it.
    """
    files = read_gguf_set(path)
    structure = check_structure(files)
    if structure is None:
        arch = files.headers[0].get_str("general.architecture")
        raise InputError(f"{path} is of architecture {arch!r}, not kimi-k3 or kimi-k31", "name a GGUF of these")
    if structure.faults:
        raise InputError(
            f"{path} does not fit its architecture: {'; '.join(structure.faults)}",
            f"look at it with: kimi-gguf inspect {path}; convert it again, or get it again",
        )


class LlamaEngine:
    """A model in a child process; a context manager.

    Args:
        model: a GGUF, or any file of a split set.
        options: how to run it.
        runtime: the patched llama.cpp; ``runtime.find()`` by default.

    Raises:
        InputError: the file does not fit its architecture.
        UsageError: there is no runtime, or an option makes no sense.
        RuntimeFault: a worker or llama.cpp refuses; nothing has been sent to any worker when it is a worker's fault.

    Example:
        >>> with LlamaEngine(Path("tiny.gguf")) as engine:  # doctest: +SKIP
        ...     logits = engine.decode([1, 2, 3]).logits
    """

    def __init__(self, model: Path, options: EngineOptions | None = None, *, runtime: Runtime | None = None) -> None:
        self.options = options or EngineOptions()
        self.runtime = runtime or find()
        path = model
        if self.options.check_structure:
            check_model(model)
        if not model.is_file():
            raise InputError(f"{model} is not a file", "name a .gguf file")
        for endpoint in self.options.rpc:
            ask_worker(endpoint, self.runtime.facts.rpc_protocol)
        self._child = Child(self._environment())
        try:
            self.model = self._load(path)
        except BaseException:
            self._child.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Id of the child process."""
        return self._child.pid

    def said(self) -> str:
        """What llama.cpp printed so far; not after ``close``."""
        return self._child.said()

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def decode(
        self, tokens: TokenIds, sequence: int = 0, *, outputs: Outputs = "all", trace: Sequence[Trace] = ()
    ) -> Decoded:
        """Continue a sequence with ``tokens``.

        Args:
            outputs: for which tokens logits are returned.
            trace: what else to return; slows the run down a little. Selections are the cache's cells, which are
                positions as long as the sequence was decoded from an empty cache and shares it with no other.

        Raises:
            UsageError: no token, or one beyond the vocabulary.
            RuntimeFault: the context is full, or the engine died or hung.
        """
        ids = self._ids(tokens)
        wanted = np.zeros(len(ids), dtype=np.uint8)
        if outputs == "all":
            wanted[:] = 1
        elif outputs == "last":
            wanted[-1] = 1
        first = self._positions[sequence]
        logits, traced = self._decode(ids, np.full(len(ids), sequence, np.int32), wanted, trace)
        return _decoded(logits, traced, first)

    def decode_together(self, sequences: Mapping[int, TokenIds]) -> dict[int, F32Array]:
        """Continue several sequences in one batch; logits F32 [n, vocabulary] of each.

        Raises:
            as ``decode``.
        """
        parts = {number: self._ids(tokens) for number, tokens in sequences.items()}
        ids = np.concatenate(list(parts.values()))
        numbers = np.concatenate([np.full(len(part), number, np.int32) for number, part in parts.items()])
        logits, _ = self._decode(ids, numbers, np.ones(len(ids), np.uint8), ())
        return {number: logits[numbers == number] for number in parts}

    def clear(self) -> None:
        """Forget all sequences."""
        self._memory("clear")
        self._positions.clear()

    def forget(self, sequence: int) -> None:
        """Forget one sequence."""
        self._memory("remove", sequence, begin=0)
        self._positions.pop(sequence, None)

    def copy(self, sequence: int, target: int) -> None:
        """Make ``target`` a copy of ``sequence``."""
        self._memory("copy", sequence, target=target)
        self._positions[target] = self._positions[sequence]

    def save_state(self, sequence: int = 0) -> U8Array:
        """The caches and KDA states of a sequence, U8 [bytes]."""
        _, (data,) = self._request({"do": "save", "sequence": sequence}, what="saving a sequence")
        return data

    def restore_state(self, data: U8Array, sequence: int = 0, *, length: int) -> None:
        """Put a saved state of ``length`` tokens into a sequence, whatever was in it."""
        self._request({"do": "restore", "sequence": sequence}, (data,), what="restoring a sequence")
        self._positions[sequence] = length

    def _environment(self) -> dict[str, str]:
        env = self.runtime.environment()
        # A worker that hangs must not outlive the limit of a call.
        env["GGML_RPC_TIMEOUT"] = str(max(1, int(self.options.timeout)))
        env["LLAMA_FUSED_INDEXER"] = "1" if self.options.fused_indexer else "0"
        return env

    def _load(self, model: Path) -> LoadedModel:
        options = self.options
        request = {
            "do": "load",
            "model": str(model),
            "rpc": options.rpc,
            "tensor_split": options.tensor_split,
            "gpu_layers": options.gpu_layers,
            "repack": options.repack,
            "check_tensors": options.check_tensors,
            "n_ctx": options.n_ctx,
            "n_batch": options.n_batch,
            "n_ubatch": options.n_ubatch,
            "n_seq": options.n_seq,
            "unified": options.unified,
            "threads": options.threads or _processors(),
            "flash_attn": options.flash_attn,
            "cache_type": options.cache_type,
        }
        answer, _ = self._child.request(request, timeout=options.load_timeout, what=f"loading {model}")
        self._positions: defaultdict[int, int] = defaultdict(int)
        return LoadedModel(
            answer["vocab"], answer["layers"], answer["context"], answer["batch"], tuple(answer["end_tokens"])
        )

    def _ids(self, tokens: TokenIds) -> I32Array:
        ids = np.asarray(tokens, dtype=np.int64).reshape(-1)
        if ids.size == 0:
            raise UsageError("no token to decode")
        if ids.min() < 0 or ids.max() >= self.model.vocab:
            wrong = ids[(ids < 0) | (ids >= self.model.vocab)][0]
            raise UsageError(f"token {wrong} is not in the vocabulary of {self.model.vocab}")
        return ids.astype(np.int32)

    def _decode(
        self, ids: I32Array, sequences: I32Array, wanted: U8Array, trace: Sequence[Trace]
    ) -> tuple[F32Array, list[tuple[str, Array]]]:
        watch = [name for kind in trace for name in _WATCH[kind]]
        answer, arrays = self._request(
            {"do": "decode", "watch": watch}, (ids, sequences, wanted), what=f"decoding {len(ids)} tokens"
        )
        for number in sequences.tolist():
            self._positions[number] += 1
        return arrays[0], list(zip(answer["trace"], arrays[1:], strict=True))

    def _memory(self, action: str, sequence: int = 0, **more: int) -> None:
        self._request({"do": "memory", "action": action, "sequence": sequence, **more}, what=f"memory {action}")

    def _request(self, header: Header, arrays: Sequence[Array] = (), *, what: str) -> tuple[Header, list[Array]]:
        return self._child.request(header, arrays, timeout=self.options.timeout, what=what)


def _decoded(logits: F32Array, traced: Sequence[tuple[str, Array]], first: int) -> Decoded:
    """Join what each graph left behind along the tokens."""
    parts: dict[tuple[str, int], list[Array]] = defaultdict(list)
    for name, values in traced:
        base, _, number = name.rpartition("-")
        parts[base, int(number)].append(values)
    result = Decoded(logits)
    for (base, layer), pieces in parts.items():
        if base == "ffn_moe_topk":
            result.experts[layer] = np.concatenate([np.atleast_2d(p) for p in pieces])
        elif base in _WEIGHTS:
            # In graph order, so a later form replaces an earlier one.
            result.expert_weights[layer] = np.concatenate(pieces, axis=None).reshape(result.experts[layer].shape)
        elif base == "ffn_moe_probs":
            result.router_probs[layer] = np.concatenate([np.atleast_2d(p) for p in pieces])
        elif base == "indexer_top_k":
            cells = [row for p in pieces for row in np.atleast_2d(p)]
            result.selections[layer] = [np.sort(row[row <= first + i]) for i, row in enumerate(cells)]
        elif base == "l_out":
            result.hidden[layer] = np.concatenate([np.atleast_2d(p) for p in pieces])
    return result


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
