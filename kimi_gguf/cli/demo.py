"""``kimi-gguf demo``."""

from __future__ import annotations

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.demo import DEFAULT_DIRECTORY, demo
from kimi_gguf.reports import demo_text


@click.command()
@click.option("--dir", "directory", default=DEFAULT_DIRECTORY, show_default=True, metavar="DIR", help="Where to work.")
@output_options
def command(directory: str, as_json: bool, quiet: bool) -> int:
    """Convert the tiny K3.1 that is shipped to Q4_K_M, inspect the result, let it write.

    The folder DIR is kept, and used again by the next run.
    """
    console = console_for(as_json, quiet)
    with console.progress() as progress:
        result = demo(directory, note=console.note, progress=progress)
    console.warnings((*result.plan.warnings, *(f"fault: {fault}" for fault in result.inspection.faults)))
    console.result(result.to_dict(), demo_text(result), quiet=str(result.file))
    return 1 if result.inspection.faults or result.predicted != result.actual else 0
