"""The functions that the verbs call, for use from Python; parameters are named as the flags.

Example:
    >>> from kimi_gguf import convert, inspect, plan
    >>> [row.sizes.total.nbytes for row in plan(shape="k3.1-pro", quant=["MXFP4"])]
    [1561518856576]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal

from convert.domain import Source
from convert.flags import PathLike, choices_from_flags
from convert.plan import check_importance, load_imatrix, make_plan, read_checkpoint
from convert.source import LocalSource
from convert.target_size import within_target
from convert.threads import worker_count
from kimi_gguf.conversion import convert
from kimi_gguf.inspection import inspect
from kimi_gguf.plan_summary import PlanSummary, summarize, summarize_shape
from kimi_gguf.sources import resolve_source
from quant.errors import UsageError
from quant.recipes import RECIPES

__all__ = ["convert", "inspect", "plan"]


def plan(
    src: PathLike | Source | None = None,
    *,
    quant: str | Sequence[str] = (),
    recipe: PathLike | None = None,
    target_size: str | int | None = None,
    shape: str | None = None,
    outfile: PathLike | None = None,
    outdir: PathLike | None = None,
    split_max_size: str | int | None = None,
    name: str | None = None,
    imatrix: PathLike | None = None,
    tensor_type: Sequence[str] = (),
    output_tensor_type: str | None = None,
    token_embedding_type: str | None = None,
    override_kv: Sequence[str] = (),
    encoder: Literal["ggml", "native"] = "native",
    no_fallback: bool = False,
    force: bool = False,
    measured: Callable[[int, int], None] = lambda done, total: None,
) -> list[PlanSummary]:
    """What conversions would give, from headers and small files alone; nothing is written.

    Args:
        src: folder of a checkpoint, repository on the Hub (``owner/name@revision``), or any ``Source``; None is the
            current folder.
        quant: one recipe, or several; every recipe when empty.
        recipe, target_size: instead of ``quant``, as ``convert``; the latter reads a sample of the weights.
        shape: ``k3`` or ``k3.1-pro`` instead of ``src``: a released model without its files.
        measured: told, for a target size, how many of how many tensors have been measured.
        others: as ``convert``.

    Returns:
        one summary for each recipe, in the order given. Recipes that need an importance matrix are planned
        without one too, and say so.

    Raises:
        UsageError: parameters that make no sense together.
        InputError: the checkpoint or imatrix cannot be used.
    """
    other = recipe is not None or target_size is not None
    names: list[str | None] = [quant] if isinstance(quant, str) else list(quant)
    names = names or ([None] if other else list(RECIPES))
    if shape is not None and src is not None:
        raise UsageError("a checkpoint and --shape exclude each other", "drop one of the two")
    every = [
        choices_from_flags(
            quant=one,
            recipe=recipe,
            target_size=target_size,
            outfile=outfile,
            outdir=outdir,
            split_max_size=split_max_size,
            name=name,
            tensor_type=tensor_type,
            output_tensor_type=output_tensor_type,
            token_embedding_type=token_embedding_type,
            override_kv=override_kv,
            encoder=encoder,
            no_fallback=no_fallback,
            force=force,
        )[1]
        for one in names
    ]
    if shape is not None and other:
        raise UsageError("--shape has no weights to measure: it goes with --quant alone", "name a checkpoint instead")
    if shape is not None:
        return summarize_shape(shape, every, has_imatrix=imatrix is not None)
    source = resolve_source(src)
    with ExitStack() as stack:
        if source is not src and isinstance(source, LocalSource):
            stack.callback(source.close)
        checkpoint = read_checkpoint(source)
        importance = None if imatrix is None else load_imatrix(imatrix, checkpoint)
        summaries = []
        for given in every:
            # One plan at a time: each holds the header of the whole vocabulary.
            choices = within_target(checkpoint, given, importance, threads=worker_count(None), measured=measured)
            plan_ = make_plan(checkpoint, choices, importance)
            if importance is not None:
                check_importance(plan_, importance)
            summaries.append(summarize(plan_))
        return summaries
