"""Which machine holds which layers: whole layers, in order, so that the fullest place is as empty as can be.

llama.cpp puts layers on its devices in a fixed order: those below ``-ngl`` on the head's processor, then RPC workers in
the order of ``--rpc``, then the head's GPUs; ``-ts`` counts the layers of each, the output counts as one more. A
placement is therefore a cut of the sequence of layers. ``cut`` finds the best one exactly, by dynamic programming over
(device, layer); equal cuts go to the one that ends earlier devices earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kimi_gguf.cluster.memory import (
    PIPELINE_COPIES,
    Load,
    ModelBytes,
    compute_bytes,
    head_compute_bytes,
    layer_caches,
    output_bytes,
    state_bytes,
)
from kimi_gguf.cluster.nodes import MAX_DEVICES, Node
from kimi_gguf.cluster.serve_flags import checkpoints
from quant.errors import InputError

DEFAULT_MARGIN = 0.05
"""Part of each memory that stays empty: for drivers, fragments, and what else runs there."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One place for layers.

    Attributes:
        node: whose it is.
        label: what llama.cpp calls it.
        memory: bytes of it.
        kind: ``processor`` of the head, ``worker`` in RAM, ``worker gpu``, ``gpu`` of the head.
    """

    node: Node
    label: str
    memory: int
    kind: str

    @property
    def remote(self) -> bool:
        return self.kind.startswith("worker")


@dataclass(frozen=True, slots=True)
class Share:
    """What one place holds; all sizes in bytes.

    Attributes:
        begin, end: layers, ``end`` not included; the output counts as layer ``n_layers``.
        weights, mla, indexer, state, compute: while it serves.
        transfer: copy of the largest tensor while it loads; 0 where that lies in other memory.
        usable: memory less margin.
    """

    pool: Pool
    begin: int
    end: int
    weights: int
    mla: int
    indexer: int
    state: int
    compute: int
    transfer: int
    usable: int

    @property
    def need(self) -> int:
        """The larger of what loading and serving take: caches and buffers are made after the weights have come."""
        return self.weights + max(self.transfer, self.mla + self.indexer + self.state + self.compute)

    @property
    def lacks(self) -> int:
        return max(self.need - self.usable, 0)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """What the head's RAM holds beside the layers of its own; bytes.

    Attributes:
        embedding: ``token_embd``.
        experts: routed experts that ``-ot`` keeps there.
        compute: buffers of its processor.
        transfer: a tensor as it was read and the message that it becomes; 0 without workers.
        checkpoints: KDA states that ``serve`` keeps, to continue a conversation from an earlier point.
        usable: memory less margin, None when not stated.
    """

    node: Node
    embedding: int
    experts: int
    compute: int
    transfer: int
    checkpoints: int
    usable: int | None

    @property
    def need(self) -> int:
        return self.embedding + self.experts + max(self.transfer, self.compute + self.checkpoints)


@dataclass(frozen=True, slots=True)
class Placement:
    """A cut of a model.

    Attributes:
        shares: places that hold something, in llama.cpp's order.
        head: the head's RAM.
        copies: 4 when the devices work on several batches at once, else 1.
        on_head: layers from the first routed one on whose experts stay in the head's RAM.
        fill: of the fullest place; above 1 it does not fit.
    """

    model: ModelBytes
    load: Load
    nodes: tuple[Node, ...]
    margin: float
    shares: tuple[Share, ...]
    head: HeadShare
    copies: int
    on_head: tuple[int, ...]
    fill: float

    @property
    def fits(self) -> bool:
        return self.fill <= 1

    def rams(self) -> list[tuple[Node, int, int | None]]:
        """Nodes whose RAM is needed beside layers: node, bytes, usable bytes if known; the head comes first."""
        found = [(self.head.node, self.head.need, self.head.usable)]
        for node in self.nodes:
            largest = [self._largest(s) for s in self.shares if s.pool.node is node and s.pool.kind == "worker gpu"]
            if largest:
                found.append((node, max(largest), _usable(node.memory, self.margin)))
        return found

    def _largest(self, share: Share) -> int:
        return max(self.model.largest[share.begin : share.end])


def place(model: ModelBytes, load: Load, nodes: Sequence[Node], *, margin: float = DEFAULT_MARGIN) -> Placement:
    """The best placement, fitting or not.

    The head's RAM takes layers when it has no GPUs. When whole layers do not fit the GPUs and the head has RAM beside
    them, the routed experts of as few layers as possible, from the front, stay in that RAM.

    Args:
        nodes: the head first.

    Raises:
        InputError: more than 16 devices.
    """
    pools = _pools(nodes)
    devices = [pool for pool in pools if pool.kind != "processor"]
    if len(devices) > MAX_DEVICES:
        raise InputError(
            f"the nodes have {len(devices)} devices, llama.cpp takes {MAX_DEVICES}",
            "leave nodes out, or let a worker show fewer of its devices",
        )
    problem = _Problem(model, load, tuple(nodes), margin)
    tries = []
    if devices:
        tries.append(problem.solve(devices, PIPELINE_COPIES if len(devices) > 1 else 1))
    if len(devices) < len(pools):
        tries.append(problem.solve(pools, 1))
    best = min(tries, key=lambda placement: placement.fill)
    head = nodes[0]
    if best.fits or not (head.devices and head.memory and head.layers):
        return best
    return problem.with_experts_on_head(devices) or best


class _Problem:
    def __init__(self, model: ModelBytes, load: Load, nodes: tuple[Node, ...], margin: float) -> None:
        self.model, self.load, self.nodes, self.margin = model, load, nodes, margin
        config = model.config
        self.count = config.n_layers + 1
        caches = [layer_caches(config, layer, load) for layer in range(config.n_layers)]
        self.caches = [_running(each) for each in zip(*caches, (0, 0, 0), strict=True)]

    def with_experts_on_head(self, devices: Sequence[Pool]) -> Placement | None:
        """The first fitting placement that keeps routed experts of the first layers in the head's RAM."""
        routed = [layer for layer, size in enumerate(self.model.experts) if size]
        low, high = 1, len(routed)
        found = None
        while low <= high:
            middle = (low + high) // 2
            tried = self.solve(devices, 1, tuple(routed[:middle]))
            if max((share.need / share.usable for share in tried.shares), default=0) <= 1:
                found, high = tried, middle - 1
            else:
                low = middle + 1
        return found if found and found.fits else None

    def solve(self, pools: Sequence[Pool], copies: int, on_head: tuple[int, ...] = ()) -> Placement:
        ends = self.cut(pools, copies, on_head)
        shares = []
        for pool, (begin, end) in zip(pools, zip([0, *ends], ends, strict=False), strict=True):
            if begin < end:
                shares.append(self.share(pool, begin, end, copies, on_head))
        head = self.head_share(shares, copies, on_head)
        fill = max(share.need / share.usable for share in shares)
        rams = Placement(self.model, self.load, self.nodes, self.margin, tuple(shares), head, copies, on_head, fill)
        own = sum(share.need for share in shares if share.pool.kind == "processor")
        for node, need, usable in rams.rams():
            if usable is not None:
                fill = max(fill, (need + (own if node is head.node else 0)) / usable)
        return Placement(self.model, self.load, self.nodes, self.margin, tuple(shares), head, copies, on_head, fill)

    def cut(self, pools: Sequence[Pool], copies: int, on_head: tuple[int, ...]) -> list[int]:
        """End of each pool's range; the processor of the head gets one layer at least, as ``copies`` supposes it."""
        best = np.full(self.count + 1, np.inf)
        best[0] = 0
        choices = []
        for pool in pools:
            # Row: where the pool begins; column: where it ends. The first of equal rows is taken.
            whole = np.maximum(best[:, None], self._fills(pool, copies, on_head))
            chosen = whole.argmin(axis=0)
            best = whole[chosen, np.arange(self.count + 1)]
            choices.append(chosen)
        ends = [self.count]
        for chosen in reversed(choices):
            ends.append(int(chosen[ends[-1]]))
        return ends[-2::-1]

    def _fills(self, pool: Pool, copies: int, on_head: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Fill of a pool that begins before layer i and ends before layer j, F64 [n + 1, n + 1]."""
        size = self.count + 1
        weights = np.array(_running(self._weights(on_head)), dtype=np.float64)
        cached = np.array(self.caches, dtype=np.float64).sum(axis=0)
        compute = np.array([self._compute(pool, begin, copies) for begin in range(size)], dtype=np.float64)
        transfer = np.zeros((size, size))
        if pool.kind == "worker":
            for begin in range(self.count):
                transfer[begin, begin + 1 :] = np.maximum.accumulate(self.model.largest[begin:])
        serving = cached[None, :] - cached[:, None] + compute[:, None]
        need = weights[None, :] - weights[:, None] + self._fixed(pool) + np.maximum(transfer, serving)
        fills: npt.NDArray[np.float64] = need / (_usable(pool.memory, self.margin) or 1)
        fills[np.tril_indices(size)] = np.inf
        np.fill_diagonal(fills, np.inf if pool.kind == "processor" else 0)
        return fills

    def share(self, pool: Pool, begin: int, end: int, copies: int, on_head: tuple[int, ...]) -> Share:
        mla, indexer, state = (cache[end] - cache[begin] for cache in self.caches)
        return Share(
            pool,
            begin,
            end,
            weights=sum(self._weights(on_head)[begin:end]),
            mla=mla,
            indexer=indexer,
            state=state,
            compute=self._compute(pool, begin, copies),
            transfer=max(self.model.largest[begin:end]) if pool.kind == "worker" else 0,
            usable=_usable(pool.memory, self.margin) or 1,
        )

    def head_share(self, shares: Sequence[Share], copies: int, on_head: tuple[int, ...]) -> HeadShare:
        sent = [max(self.model.largest[s.begin : s.end]) for s in shares if s.pool.remote]
        return HeadShare(
            self.nodes[0],
            embedding=self.model.embedding,
            experts=sum(self.model.experts[layer] for layer in on_head),
            compute=output_bytes(self.model.config, self.load)
            if any(share.pool.kind == "processor" for share in shares)
            else head_compute_bytes(self.model.config, self.load, copies=copies),
            transfer=2 * max(sent, default=0),
            checkpoints=self._checkpoints(),
            usable=_usable(self.nodes[0].memory, self.margin),
        )

    def _weights(self, on_head: tuple[int, ...]) -> list[int]:
        kept = frozenset(on_head)
        experts = self.model.experts
        return [size - (experts[i] if i in kept else 0) for i, size in enumerate(self.model.weights)]

    def _compute(self, pool: Pool, begin: int, copies: int) -> int:
        return compute_bytes(self.model.config, self.load, begin, first=begin == 0, copies=copies)

    def _fixed(self, pool: Pool) -> int:
        """What lies in the memory of the head's layers beside them."""
        if pool.kind != "processor":
            return 0
        workers = any(node is not self.nodes[0] for node in self.nodes)
        transfer = 2 * max(self.model.largest) if workers else 0
        return self.model.embedding + max(output_bytes(self.model.config, self.load) + self._checkpoints(), transfer)

    def _checkpoints(self) -> int:
        config = self.model.config
        states = config.layer_kinds.count("kda") * state_bytes(config)
        return checkpoints(config) * states * self.load.parallel


def _pools(nodes: Sequence[Node]) -> list[Pool]:
    """Places in llama.cpp's order: the head's processor, workers, the head's GPUs."""
    head = nodes[0]
    pools = []
    if head.pools and not head.devices:
        pools.append(Pool(head, "CPU", head.pools[0], "processor"))
    number = 0
    for node in nodes[1:]:
        for memory in node.pools:
            pools.append(Pool(node, f"RPC{number}", memory, "worker gpu" if node.devices else "worker"))
            number += 1
    for index, memory in enumerate(head.devices if head.layers else ()):
        pools.append(Pool(head, f"{head.backend}{index}", memory, "gpu"))
    return pools


def _running(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def _usable(memory: int | None, margin: float) -> int | None:
    return None if memory is None else int(memory * (1 - margin))
