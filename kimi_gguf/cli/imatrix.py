"""``kimi-gguf imatrix SRC --text FILE -o imatrix.gguf``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kimi_gguf.cli.options import console_for, output_options, stream_options

if TYPE_CHECKING:
    from kimi_gguf.verify.imatrix import ImatrixResult


@click.command()
@click.argument("src")
@click.option("--text", required=True, metavar="FILE", help="UTF-8 text to run on.")
@click.option("-o", "--outfile", default="imatrix.gguf", show_default=True, metavar="FILE", help="Where it goes.")
@click.option("--tokens", type=int, metavar="N", help="Stop after N tokens.")
@click.option("--context", type=int, default=512, show_default=True, metavar="N", help="Tokens per chunk.")
@click.option("--in-file", multiple=True, metavar="FILE", help="Add a matrix of an earlier run. Repeatable.")
@click.option(
    "--prior",
    type=int,
    default=16,
    show_default=True,
    metavar="N",
    help="Fill experts that fewer than N tokens reached with the layer's mean.",
)
@click.option(
    "--preset",
    type=click.Choice(["llama.cpp", "official"]),
    default="llama.cpp",
    show_default=True,
    help="Whose conventions the model runs by.",
)
@stream_options
@output_options
def command(src: str, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Make an importance matrix of SRC, a checkpoint's folder or a GGUF, one layer at a time.

    SRC is on this machine; a repository on the Hub is fetched first, with `hf download`.

    The file has llama.cpp's form: `convert --imatrix` and llama-quantize read it.
    """
    # Here, as torch is an extra: the help works without it.
    from kimi_gguf.verify.imatrix import imatrix

    console = console_for(as_json, quiet)
    with console.stages() as progress:
        result = imatrix(src, progress=progress, note=console.note, **flags)
    console.result(result.to_dict(), _text(result), quiet=str(result.path))


def _text(result: ImatrixResult) -> str:
    from kimi_gguf.verify.importance import worst_layers

    lines = [
        f"{result.path}: {result.entries} weight matrices, {result.tokens} tokens in {result.chunks} chunks"
        + (f", {result.merged_chunks} chunks merged" if result.merged_chunks else "")
    ]
    found = result.coverage
    if found is not None:
        lines.append(
            f"hits per expert: min {found.least}, 1 % {found.percent1:g}, median {found.median:g}; "
            f"{found.unseen} of {found.experts} never reached, {found.rare} fewer than {found.prior} times"
        )
        for layer in worst_layers(found, 3) if found.unseen else ():
            lines.append(f"  layer {layer.layer}: {layer.unseen} never reached, median {layer.median:g}")
    return "\n".join(lines)
