"""``kimi-gguf serve MODEL``."""

from __future__ import annotations

from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.cluster.serve import DEFAULT_CONTEXT, DEFAULT_PORT, GIVE_UP_SECONDS, WORKER_SECONDS, serve
from kimi_gguf.cluster.supervise import MOST_THREADS
from kimi_gguf.console_steps import StatusLine


@click.command("serve")
@click.argument("model")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.option("--rpc", metavar="HOST:PORT,...", help="Workers that hold the layers.")
@click.option("--nodes", metavar="FILE", help="nodes.toml: place the layers as `cluster plan` shows.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Tokens of one conversation; {DEFAULT_CONTEXT} by default, or the model's limit.",
)
@click.option("--parallel", type=click.IntRange(1, 256), default=1, show_default=True, help="Conversations at once.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--alias", metavar="NAME", help="The model's name in the API; by default its file's.")
@click.option("--threads", type=click.IntRange(1, MOST_THREADS), metavar="N", help="Threads of the head's processor.")
@click.option("--load-timeout", type=float, metavar="SECONDS", help="For loading; by default by the file's size.")
@click.option(
    "--worker-timeout",
    type=click.FloatRange(min=1),
    default=WORKER_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="For one answer of a worker.",
)
@click.option(
    "--give-up",
    type=click.FloatRange(min=1),
    default=GIVE_UP_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a lost worker.",
)
@click.option("--log", metavar="FILE", help="The server's output; by default in the cache folder.")
@output_options
def command(model: str, rpc: str | None, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Serve MODEL, a GGUF, with an OpenAI-compatible API, until interrupted.

    A head or a worker that is lost is started or waited for again. What follows -- goes to llama-server.
    """
    console = console_for(as_json, quiet)
    workers = [endpoint.strip() for endpoint in (rpc or "").split(",") if endpoint.strip()]
    with StatusLine(console) as line:
        result = serve(model, rpc=workers, note=line.note, status=line.status, **flags)
    console.result(result.to_dict(), f"served for {result.seconds:.0f} s with {result.starts - 1} restarts")
