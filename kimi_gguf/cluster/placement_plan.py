"""The function behind the verb ``cluster plan``; its parameters are named as the flags."""

from __future__ import annotations

import os
from dataclasses import replace

from kimi_gguf.cluster.memory import Load, ModelBytes
from kimi_gguf.cluster.memory_model import model_bytes, released_bytes
from kimi_gguf.cluster.nodes import Node, read_nodes
from kimi_gguf.cluster.placement import DEFAULT_MARGIN, Placement, place
from kimi_gguf.cluster.placement_report import shortages
from kimi_gguf.sizes import human_bytes
from quant.errors import InputError, UsageError
from quant.recipes import RECIPES

DEFAULT_CONTEXT = 32_768
DEFAULT_UBATCH = 512
_SHORTEST = 1024
_MAX_CONTEXT = 1 << 24
_MAX_PARALLEL = 256


def cluster_plan(
    model: str | os.PathLike[str] | None = None,
    *,
    nodes: str | os.PathLike[str],
    shape: str | None = None,
    quant: str | None = None,
    context: int | None = None,
    parallel: int = 1,
    ubatch: int = DEFAULT_UBATCH,
    margin: float = DEFAULT_MARGIN,
) -> Placement:
    """Which machine of a cluster holds which part of a model, from headers alone.

    Args:
        model: a GGUF, any file of a set, or ``hf://owner/name/file.gguf``.
        nodes: file that describes the machines, see ``kimi_gguf.cluster.nodes``.
        shape, quant: a released shape in a recipe, instead of ``model``.
        context: tokens of one sequence; 32768, or the model's limit where that is less, by default.
        parallel: sequences at once, each with a context of its own.
        ubatch: tokens of one graph; compute buffers grow with it.
        margin: part of each memory that stays free, 0.05 for 5 %.

    Raises:
        UsageError: parameters that make no sense.
        InputError: no such model or nodes; or the model does not fit: names each node that lacks memory, how much, and
            what would fit.
    """
    load = check_load(DEFAULT_CONTEXT if context is None else context, parallel, ubatch, margin)
    machines = read_nodes(nodes)
    sized = model_bytes(model, shape=shape, quant=quant)
    most = sized.config.context_length
    if context is not None and context > most:
        raise UsageError(f"--context {context} is above the model's {most} tokens", f"ask for {most} at most")
    load = replace(load, context=min(load.context, most), ubatch=min(load.ubatch, most))
    placement = place(sized, load, machines, margin=margin)
    if not placement.fits:
        lacking = "; ".join(shortages(placement))
        raise InputError(
            f"{sized.label} with {parallel} x {load.context:,} tokens does not fit: {lacking}",
            _what_would_fit(placement, shape),
        )
    return placement


def check_load(context: int, parallel: int, ubatch: int, margin: float) -> Load:
    """The load that the flags describe.

    Raises:
        UsageError: one of them is out of range.
    """
    if not 0 < context <= _MAX_CONTEXT:
        raise UsageError(f"--context {context} is no length of a conversation", f"give 1 to {_MAX_CONTEXT:,} tokens")
    if not 0 < parallel <= _MAX_PARALLEL:
        raise UsageError(f"--parallel {parallel} is no number of sequences", f"give 1 to {_MAX_PARALLEL}")
    if not 0 < ubatch <= context:
        raise UsageError(f"--ubatch {ubatch} is no size of a graph", f"give 1 to {context} tokens, the context")
    if not 0 <= margin < 1:
        raise UsageError(f"--margin {margin:g} leaves no memory", "give a part of it: 0.05 keeps 5 % free")
    return Load(context, parallel, ubatch)


def _what_would_fit(placement: Placement, shape: str | None) -> str:
    """Less of what was asked for that would fit, or how much memory there would have to be."""
    load = placement.load
    found: list[str] = []
    length = 1 << (load.context - 1).bit_length() - 1
    while length >= _SHORTEST and not found:
        smaller = replace(load, context=length, ubatch=min(load.ubatch, length))
        if _fits(placement.model, smaller, placement.nodes, placement.margin):
            found.append(f"--context {length}")
        length //= 2
    if load.parallel > 1 and _fits(placement.model, replace(load, parallel=1), placement.nodes, placement.margin):
        found.append("--parallel 1")
    if shape is not None:
        smaller_model = _largest_fitting(shape, placement)
        if smaller_model is not None:
            found.append(f"{smaller_model.label.rpartition(' ')[2]} with {human_bytes(smaller_model.total)} of weights")
    if found:
        return f"would fit: {', or '.join(found)}"
    need = sum(share.need for share in placement.shares) + placement.head.need
    usable = sum(sum(node.pools) for node in placement.nodes) * (1 - placement.margin)
    return f"all nodes together have {human_bytes(int(usable))} usable, {human_bytes(need)} are needed"


def _largest_fitting(shape: str, placement: Placement) -> ModelBytes | None:
    models = sorted((released_bytes(shape, name) for name in RECIPES), key=lambda model: -model.total)
    for model in models:
        fits = model.total < placement.model.total and _fits(model, placement.load, placement.nodes, placement.margin)
        if fits:
            return model
    return None


def _fits(model: ModelBytes, load: Load, nodes: tuple[Node, ...], margin: float) -> bool:
    room = sum(sum(node.pools) + (node.memory or 0) for node in nodes)
    return model.total < room and place(model, load, nodes, margin=margin).fits
