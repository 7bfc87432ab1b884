"""``kimi-gguf verify MODEL --source SRC``."""

from __future__ import annotations

from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.verify.payload import verify_model
from kimi_gguf.verify.verify_text import verdict_line, verify_text
from quant.errors import BelowBar


@click.command()
@click.argument("model")
@click.option(
    "--source", required=True, metavar="SRC", help="Checkpoint that MODEL was made from: a folder, or hf://..."
)
@click.option(
    "--sample",
    metavar="P",
    help="Share of the rows to read, 1% without it. Every expert of every layer gives at least one row.",
)
@click.option("--full", is_flag=True, help="Read every row.")
@click.option("--imatrix", metavar="FILE", help="The importance matrix that MODEL was quantized with.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Of the choice of rows; another looks elsewhere.",
)
@click.option("--threads", type=int, metavar="N", help="Workers; all processors that may be used without it.")
@output_options
def command(model: str, as_json: bool, quiet: bool, **flags: Any) -> int:
    """Trace every tensor of the GGUF MODEL to the checkpoint SRC, and compare the values.

    Structure first: keys, shapes, offsets, vocabulary. Then lossless tensors bit by bit; quantized ones are encoded
    again and compared byte by byte, or, where the encoder is not recognised, by what their type explains.

    Either side may be on the Hub (hf://owner/name/FOLDER, hf://owner/name@revision). Headers and a few blocks of every
    tensor are then read by ranges; no file is downloaded.

    Exits with 3 when anything is wrong, with 1 when a side cannot be read.
    """
    console = console_for(as_json, quiet)
    with console.stages() as progress:
        report = verify_model(model, progress=progress, **flags)
    console.warnings(report.warnings)
    console.result(report.to_dict(), verify_text(report), quiet=verdict_line(report))
    return 0 if report.ok else BelowBar.exit_code
