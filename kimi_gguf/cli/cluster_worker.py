"""``kimi-gguf cluster worker``."""

from __future__ import annotations

from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.cluster.supervise import MOST_THREADS
from kimi_gguf.cluster.worker import DEFAULT_BIND, cluster_worker
from kimi_gguf.console_steps import StageBar


@click.command("worker")
@click.option("--bind", default=DEFAULT_BIND, show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--seed", metavar="MODEL", help="Fill the tensor cache from this GGUF first.")
@click.option("--seed-layers", metavar="A-B", help="Seed only these layers, and what belongs to none.")
@click.option("--cache", metavar="DIR", help="Keep received tensors in DIR.")
@click.option("--insecure-bind", is_flag=True, help="Allow 0.0.0.0, on a network that you trust.")
@click.option("--threads", type=click.IntRange(1, MOST_THREADS), metavar="N", help="Threads of the CPU device.")
@click.option("--device", "devices", multiple=True, metavar="NAME", help="Offer this device. Repeatable.")
@click.option("--log", metavar="FILE", help="The server's output; by default in the cache folder.")
@output_options
def command(as_json: bool, quiet: bool, **flags: Any) -> None:
    """Run an RPC worker here and keep it running, until it is interrupted.

    The next port, at the same address, answers its state as JSON.
    """
    console = console_for(as_json, quiet)
    with StageBar(console) as bar:
        result = cluster_worker(note=bar.stage, step=bar.step, warn=lambda text: console.warnings((text,)), **flags)
    console.result(result.to_dict(), f"worker at {result.endpoint} stopped after {result.seconds:.0f} s")
