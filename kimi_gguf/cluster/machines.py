"""Memory of a released model in every recipe and at common contexts, and which machines hold it: all computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_gguf.cluster.memory import Load, compute_bytes, layer_caches, output_bytes
from kimi_gguf.cluster.memory_model import released_bytes
from kimi_gguf.cluster.nodes import Node
from kimi_gguf.cluster.placement import DEFAULT_MARGIN, place
from kimi_gguf.console import table
from quant.recipes import RECIPES

CONTEXTS = (8_192, 32_768, 131_072, 262_144, 1_048_576)
_GB = 10**9
_UBATCH = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, or several, that people have; the first node is the head."""

    name: str
    nodes: tuple[Node, ...]


def _gpus(count: int, gigabytes: int, *, address: str | None = None) -> Node:
    return Node(address or "head", address, devices=(gigabytes * _GB,) * count, head=address is None)


def _ram(gigabytes: int, *, address: str | None = None) -> Node:
    return Node(address or "head", address, memory=gigabytes * _GB, head=address is None)


MACHINES = (
    Machine("8 x B300", (_gpus(8, 288),)),
    Machine("8 x B200", (_gpus(8, 180),)),
    Machine("8 x H200", (_gpus(8, 141),)),
    Machine("16 x H100", (_gpus(8, 80), _gpus(8, 80, address="second:50052"))),
    Machine("Mac 512", (_ram(512),)),
    Machine("2 Macs 512", (_ram(512), _ram(512, address="second:50052"))),
    Machine("CPU 1.5 TB", (_ram(1536),)),
    Machine("CPU 2 TB", (_ram(2048),)),
    Machine("CPU 3 TB", (_ram(3072),)),
)
"""GPUs by their nominal memory (288, 180, 141, 80 GB each), RAM as it is sold; a GB is 1e9 bytes."""


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One recipe.

    Attributes:
        quant: the recipe.
        weights: bytes of all tensors.
        needs: bytes in one memory, by context: weights, caches, state and compute buffers of one sequence.
        longest: by machine, the longest of the contexts that it holds; None when it holds none.
    """

    quant: str
    weights: int
    needs: dict[int, int]
    longest: dict[str, int | None]


def machine_rows(shape: str, *, margin: float = DEFAULT_MARGIN) -> list[MachineRow]:
    """A row for every recipe, from large to small.

    Raises:
        UsageError: an unknown shape.
    """
    rows = []
    for name in RECIPES:
        model = released_bytes(shape, name)
        longest: dict[str, int | None] = {}
        for machine in MACHINES:
            room = sum(sum(node.pools) for node in machine.nodes)
            fitting = (
                context
                for context in reversed(CONTEXTS)
                if model.total < room and place(model, Load(context, 1, _UBATCH), machine.nodes, margin=margin).fits
            )
            longest[machine.name] = next(fitting, None)
        config = model.config
        needs = {}
        for context in CONTEXTS:
            load = Load(context, 1, _UBATCH)
            cached = sum(sum(layer_caches(config, layer, load)) for layer in range(config.n_layers))
            buffers = compute_bytes(config, load, 0, first=True, copies=1) + output_bytes(config, load)
            needs[context] = model.total + cached + buffers
        rows.append(MachineRow(name, model.total, needs, longest))
    return sorted(rows, key=lambda row: -row.weights)


def machines_value(shape: str, rows: Sequence[MachineRow]) -> dict[str, Any]:
    """A JSON object; sizes in bytes."""
    return {
        "shape": shape,
        "ubatch": _UBATCH,
        "rows": [
            {
                "quant": row.quant,
                "weights": row.weights,
                "needs": {str(context): need for context, need in row.needs.items()},
                "longest_context": row.longest,
            }
            for row in rows
        ],
    }


def machines_text(shape: str, rows: Sequence[MachineRow]) -> str:
    """Two tables."""
    contexts = [f">{_tokens(context)}" for context in CONTEXTS]
    needs = table(
        ("quant", ">weights", *contexts),
        [(r.quant, f"{r.weights / _GB:,.1f}", *(f"{need / _GB:,.1f}" for need in r.needs.values())) for r in rows],
    )
    longest = table(
        ("quant", *(f">{machine.name}" for machine in MACHINES)),
        [(r.quant, *("-" if c is None else _tokens(c) for c in r.longest.values())) for r in rows],
    )
    return (
        f"{shape}: memory in GB (1e9 bytes) with one sequence of so many tokens, in one memory\n\n{needs}\n\n"
        f"Longest of these contexts that a machine holds, with whole layers per device\n\n{longest}"
    )


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >> 20 else f"{count >> 10}k"
