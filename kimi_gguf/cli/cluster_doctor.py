"""``kimi-gguf cluster doctor``."""

from __future__ import annotations

from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.cluster.doctor import cluster_doctor, report_text
from kimi_gguf.cluster.placement_plan import DEFAULT_CONTEXT


@click.command("doctor")
@click.argument("model", required=False)
@click.option("--nodes", required=True, metavar="FILE", help="nodes.toml: the machines.")
@click.option(
    "--context",
    type=int,
    metavar="N",
    help=f"Tokens of one conversation; {DEFAULT_CONTEXT} by default, or the model's limit.",
)
@click.option("--parallel", type=int, default=1, show_default=True, metavar="N", help="Conversations at once.")
@click.option("--sample/--no-sample", default=True, show_default=True, help="Run a small model over all workers.")
@output_options
def command(as_json: bool, quiet: bool, **flags: Any) -> int:
    """Check a cluster before anything is loaded: reach, build, memory, links, and the numbers of a small model.

    With MODEL, each worker's free memory is compared with its share of it. Exits with 1 when a node is not fit.
    """
    console = console_for(as_json, quiet)
    found = cluster_doctor(note=console.note, **flags)
    essence = [f"{node.name}: {fault}" for node in found.nodes for fault in node.faults]
    console.result(found.to_dict(), report_text(found), quiet="\n".join([*essence, *found.faults]) or "healthy")
    return 0 if found.healthy else 1
