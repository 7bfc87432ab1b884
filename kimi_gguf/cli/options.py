"""Flags that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from convert.flags import DEFAULT_SPLIT, ENCODERS
from kimi_gguf.console import Console

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def output_options(command: Command) -> Command:
    """``--json`` and ``-q``."""
    return _chain(
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."),
        click.option("-q", "--quiet", is_flag=True, help="Print only the essential lines of the result."),
    )(command)


def console_for(as_json: bool, quiet: bool, *, yes: bool = False) -> Console:
    """The console that the flags ask for; ``--json`` wins over ``-q``."""
    return Console("json" if as_json else "quiet" if quiet else "human", yes=yes)


def recipe_options(command: Command) -> Command:
    """The flags of ``convert`` and ``plan`` that decide output bytes, but ``--quant``."""
    return _chain(
        click.option("--outfile", metavar="FILE", help="Write one file, split only with --split-max-size."),
        click.option(
            "--outdir",
            metavar="DIR",
            help=f"Write files named by convention into DIR, split at {DEFAULT_SPLIT} unless told otherwise.",
        ),
        click.option("--recipe", metavar="FILE", help="Types from a text file, instead of --quant."),
        click.option(
            "--target-size",
            metavar="N(G|T)",
            help="Choose the types with the least measured error within so many bytes, instead of --quant.",
        ),
        click.option("--split-max-size", metavar="N(M|G)", help="Largest file, in bytes, M (1e6) or G (1e9)."),
        click.option("--name", metavar="TEXT", help="Name of the model, when not the checkpoint's own."),
        click.option("--imatrix", metavar="FILE", help="Importance matrix, GGUF or the older .dat."),
        click.option(
            "--tensor-type",
            multiple=True,
            metavar="REGEX=TYPE",
            help="Type of the tensors whose name REGEX is found in. Repeatable; the first match decides.",
        ),
        click.option("--output-tensor-type", metavar="TYPE", help="Type of output.weight."),
        click.option("--token-embedding-type", metavar="TYPE", help="Type of token_embd.weight."),
        click.option(
            "--override-kv",
            multiple=True,
            metavar="KEY=TYPE:VALUE",
            help="Set a metadata key; TYPE is int, float, bool or str. Repeatable.",
        ),
        click.option(
            "--encoder",
            type=click.Choice(ENCODERS),
            default="native",
            show_default=True,
            help="native works on the MXFP4 codes; ggml writes the bytes of llama-quantize.",
        ),
        click.option("--no-fallback", is_flag=True, help="Stop where a row does not fit the blocks of its type."),
        click.option("--force", is_flag=True, help="Let --tensor-type go below the floors."),
    )(command)


def stream_options(command: Command) -> Command:
    """The flags of verbs that run a model layer by layer."""
    return _chain(
        click.option("--memory", default="20G", show_default=True, metavar="N(M|G)", help="Memory to stay within."),
        click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="A torch device: cpu, cuda."),
        click.option("--scratch", metavar="DIR", help="Keep hidden states in DIR, so that the run can be resumed."),
        click.option("--resume", is_flag=True, help="Continue an interrupted run whose states are on disk."),
    )(command)


def _chain(*decorators: Decorator) -> Decorator:
    def apply(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply
