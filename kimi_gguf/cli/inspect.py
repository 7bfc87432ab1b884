"""``kimi-gguf inspect FILE``."""

from __future__ import annotations

import click

from kimi_gguf import api
from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.reports import inspection_text


@click.command()
@click.argument("file")
@click.option("--tensors", is_flag=True, help="List every tensor too.")
@output_options
def command(file: str, tensors: bool, as_json: bool, quiet: bool) -> int:
    """Show what the GGUF FILE, or the split set that it belongs to, holds, and check its structure.

    FILE may be on the Hub: hf://owner/name/file.gguf, or a repository or folder that holds one model.

    Exits with 1 when the structure has faults.
    """
    found = api.inspect(file)
    console = console_for(as_json, quiet)
    console.result(found.to_dict(tensors=tensors), inspection_text(found, tensors=tensors))
    console.warnings((*found.warnings, *(f"fault: {fault}" for fault in found.faults)))
    return 1 if found.faults else 0
