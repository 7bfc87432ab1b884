"""``kimi-gguf export ollama MODEL`` and ``kimi-gguf export lmstudio MODEL``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.export import export_lmstudio, export_ollama


@click.group()
def command() -> None:
    """Lay a GGUF out for programs that bring their own llama.cpp.

    They run it when that llama.cpp knows the model's architecture, kimi-k3 or kimi-k31.
    """


@command.command(short_help="Write a Modelfile; a split set is merged first.")
@click.argument("model")
@click.option("--out", metavar="DIR", help="Folder of the Modelfile; NAME-ollama beside the model without it.")
@output_options
def ollama(model: str, out: str | None, as_json: bool, quiet: bool) -> None:
    """Write a Modelfile for MODEL, a GGUF or any file of a split set; a set is merged into one file."""
    console = console_for(as_json, quiet)
    with console.stages() as progress:
        made = export_ollama(model, out=out, note=console.note, progress=progress)
    text = f"wrote {made.files[0]}, {made.added_bytes:,} bytes of model data\nollama create NAME -f {made.files[0]}"
    console.result(made.to_dict(), text, quiet=str(made.files[0]))


@command.command(short_help="Link the model into LM Studio's folder.")
@click.argument("model")
@click.option("--out", metavar="DIR", help="LM Studio's folder of models; ~/.lmstudio/models without it.")
@output_options
def lmstudio(model: str, out: str | None, as_json: bool, quiet: bool) -> None:
    """Link MODEL, a GGUF or any file of a split set, into LM Studio's folder; nothing is copied."""
    made = export_lmstudio(model, out=out)
    console = console_for(as_json, quiet)
    kept = "keep the original where it is" if made.way == "symbolic link" else "the data is stored once"
    console.result(
        made.to_dict(), f"{made.directory}: {_count(made.files)}, by {made.way}; {kept}", str(made.directory)
    )


def _count(files: Sequence[object]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"
