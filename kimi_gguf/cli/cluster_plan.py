"""``kimi-gguf cluster plan MODEL --nodes nodes.toml``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.cluster.machines import machine_rows, machines_text, machines_value
from kimi_gguf.cluster.placement import DEFAULT_MARGIN
from kimi_gguf.cluster.placement_flags import flags
from kimi_gguf.cluster.placement_plan import DEFAULT_CONTEXT, DEFAULT_UBATCH, cluster_plan
from kimi_gguf.cluster.placement_report import placement_text, placement_value
from quant.errors import UsageError


@click.command()
@click.argument("model", required=False)
@click.option("--nodes", metavar="FILE", help="The machines: a TOML file with a [[node]] table for each.")
@click.option("--shape", metavar="NAME", help="k3 or k3.1-pro: a released model, without its files; with --quant.")
@click.option("--quant", metavar="TYPE", help="Recipe of --shape, for example Q3_K_M.")
@click.option(
    "--context",
    type=int,
    metavar="N",
    help=f"Tokens of one conversation; {DEFAULT_CONTEXT} by default, or the model's limit.",
)
@click.option("--parallel", type=int, default=1, show_default=True, help="Conversations at once, each of --context.")
@click.option("--ubatch", type=int, default=DEFAULT_UBATCH, show_default=True, help="Tokens of one graph.")
@click.option(
    "--margin", type=float, default=DEFAULT_MARGIN, show_default=True, help="Part of each memory that stays free."
)
@click.option("--all", "everything", is_flag=True, help="Every recipe of --shape at common contexts, on machines.")
@output_options
def command(
    model: str | None, nodes: str | None, everything: bool, as_json: bool, quiet: bool, margin: float, **flags_: Any
) -> None:
    """Plan which machine holds which part of MODEL, from headers alone, and print llama.cpp's flags for it.

    MODEL is a GGUF, any file of a set, or hf://owner/name/file.gguf. Fails when it does not fit, and says what would.
    """
    console = console_for(as_json, quiet)
    if everything:
        if model is not None or nodes is not None or flags_["quant"] is not None:
            raise UsageError("--all covers every recipe and its own machines", "give --shape alone: --shape k3.1-pro")
        shape = flags_["shape"] or "k3.1-pro"
        rows = machine_rows(shape, margin=margin)
        console.result(machines_value(shape, rows), machines_text(shape, rows))
        return
    if nodes is None:
        raise UsageError("no machines are named", "give --nodes nodes.toml, or --all for common machines")
    placement = cluster_plan(model, nodes=nodes, margin=margin, **flags_)
    console.result(placement_value(placement), placement_text(placement), quiet=shlex.join(flags(placement)))
