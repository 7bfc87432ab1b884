"""A placement for people and programs: one table in bytes, what the head needs, flags, and the time of loading."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from kimi_gguf.cluster.forecast import Transfer, forecast
from kimi_gguf.cluster.nodes import Node
from kimi_gguf.cluster.placement import Placement, Share
from kimi_gguf.cluster.placement_flags import flags
from kimi_gguf.console import table
from kimi_gguf.sizes import human_bytes


def placement_value(placement: Placement) -> dict[str, Any]:
    """A JSON object; sizes in bytes, times in seconds."""
    head, load = placement.head, placement.load
    return {
        "model": placement.model.label,
        "architecture": placement.model.config.arch,
        "tensor_bytes": placement.model.total,
        "context": load.context,
        "parallel": load.parallel,
        "ubatch": load.ubatch,
        "margin": placement.margin,
        "fill": round(placement.fill, 6),
        "pipeline_copies": placement.copies,
        "devices": [_share_value(share, placement) for share in placement.shares],
        "head": {
            "node": head.node.name,
            "embedding": head.embedding,
            "experts": head.experts,
            "compute": head.compute,
            "transfer": head.transfer,
            "checkpoints": head.checkpoints,
            "need": head.need,
            "usable": head.usable,
        },
        "ram_beside_devices": [
            {"node": node.name, "need": need, "usable": usable} for node, need, usable in placement.rams()[1:]
        ],
        "flags": flags(placement),
        "load": [
            {
                "node": t.node.name,
                "bytes": t.nbytes,
                "seconds": _rounded(t.seconds),
                "seeded_bytes": t.seeded,
                "seeded_seconds": _rounded(t.seeded_seconds),
            }
            for t in forecast(placement)
        ],
    }


def placement_text(placement: Placement) -> str:
    """The report."""
    load = placement.load
    sequences = "1 sequence" if load.parallel == 1 else f"{load.parallel} sequences"
    parts = [
        f"{placement.model.label}: {human_bytes(placement.model.total)} of weights, "
        f"{sequences} of {load.context:,} tokens, graphs of {load.ubatch} tokens",
        _table(placement),
        _head(placement),
        *_times(forecast(placement)),
        shlex.join(flags(placement)),
    ]
    return "\n\n".join(parts)


def shortages(placement: Placement) -> list[str]:
    """What each node lacks, a sentence each; empty when the placement fits."""
    found = []
    head_layers = sum(share.need for share in placement.shares if share.pool.kind == "processor")
    for share in placement.shares:
        if share.lacks and share.pool.kind != "processor":
            found.append(_lack(share.pool.node, share.pool.label, share.need, share.usable))
    for node, need, usable in placement.rams():
        whole = need + (head_layers if node is placement.head.node else 0)
        if usable is not None and whole > usable:
            found.append(_lack(node, "RAM", whole, usable))
    return found


def _lack(node: Node, where: str, need: int, usable: int) -> str:
    return (
        f"{node.name} ({where}) lacks {human_bytes(need - usable)}: "
        f"{human_bytes(need)} needed, {human_bytes(usable)} usable"
    )


def _share_value(share: Share, placement: Placement) -> dict[str, Any]:
    last = placement.model.config.n_layers
    return {
        "node": share.pool.node.name,
        "device": share.pool.label,
        "layers": [share.begin, min(share.end, last)],
        "output": share.end > last,
        "weights": share.weights,
        "mla_cache": share.mla,
        "indexer_cache": share.indexer,
        "kda_state": share.state,
        "compute": share.compute,
        "transfer": share.transfer,
        "need": share.need,
        "memory": share.pool.memory,
        "usable": share.usable,
    }


def _table(placement: Placement) -> str:
    last = placement.model.config.n_layers
    unit, scale = ("GB", 1e9) if max(share.need for share in placement.shares) >= 1e9 else ("MB", 1e6)
    columns = ("node", "device", "layers", *(f">{c}" for c in ("weights", "MLA", "indexer", "KDA", "compute")))
    rows = []
    for share in placement.shares:
        layers = f"{share.begin}-{min(share.end, last) - 1}" if share.begin < last else ""
        layers += (" + output" if layers else "output") if share.end > last else ""
        sizes = (share.weights, share.mla, share.indexer, share.state, share.compute, share.transfer, share.need)
        usable = f"{share.need / share.usable:.0%} of {share.usable / scale:,.2f}"
        cells = (f"{size / scale:,.2f}" for size in sizes)
        rows.append((share.pool.node.name, share.pool.label, layers, *cells, usable))
    text = table((*columns, ">transfer", ">need", ">of usable"), rows)
    pipelined = f"; {placement.copies} batches are under way at once" if placement.copies > 1 else ""
    return (
        f"{text}\nIn {unit} of {scale:.0e} bytes. {placement.margin:.0%} of each memory is left free{pipelined}. "
        "Need is weights and the larger of transfer (while it loads) and the rest (while it serves)."
    ).replace("e+0", "e")


def _head(placement: Placement) -> str:
    head = placement.head
    parts = [
        f"token embedding {human_bytes(head.embedding)}",
        f"buffers {human_bytes(head.compute)}",
        f"context checkpoints of serve {human_bytes(head.checkpoints)}",
    ]
    if head.transfer:
        parts.append(f"while loading, two copies of the largest tensor {human_bytes(head.transfer)}")
    if head.experts:
        parts.append(f"routed experts of {len(placement.on_head)} layers {human_bytes(head.experts)}")
    known = "" if head.usable is not None else "; its memory is not stated, so this is not checked"
    lines = [f"RAM of the head ({head.node.name}), beside layers of its own: {', '.join(parts)}{known}."]
    for node, need, usable in placement.rams()[1:]:
        unknown = "" if usable is not None else "; its RAM is not stated, so this is not checked"
        lines.append(f"RAM of {node.name}, while loading: one copy of its largest tensor {human_bytes(need)}{unknown}.")
    return "\n".join(lines)


def _times(transfers: Sequence[Transfer]) -> list[str]:
    if not transfers:
        return []
    rows = [
        (
            t.node.name,
            human_bytes(t.nbytes),
            _speed(t),
            _duration(t.seconds),
            human_bytes(t.seeded),
            _duration(t.seeded_seconds),
        )
        for t in transfers
    ]
    text = table(("loading", ">sent", ">Gbit/s", ">at least", ">seeded", ">at least"), rows)
    known = [t.seconds for t in transfers if t.seconds is not None]
    whole = f" All together at least {_duration(sum(known))}." if len(known) == len(transfers) > 1 else ""
    return [f"{text}\nWorkers are loaded one after the other, and again at every start unless seeded.{whole}"]


def _speed(transfer: Transfer) -> str:
    return "?" if transfer.speed is None else f"{transfer.speed * 8 / 1e9:g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
