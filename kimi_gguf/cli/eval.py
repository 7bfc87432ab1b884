"""``kimi-gguf eval MODEL --baseline BASE`` and ``kimi-gguf eval record BASE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.disk import disk_faults
from kimi_gguf.cli.options import console_for, output_options, stream_options
from kimi_gguf.console import Console
from kimi_gguf.verify.bars import Bars
from kimi_gguf.verify.html import GENERATOR, page
from kimi_gguf.verify.observations import DEFAULT_CONTEXT
from kimi_gguf.verify.places import begins_with, check_outfile
from kimi_gguf.verify.report import report_text
from kimi_gguf.verify.trace_format import DEFAULT_TOP
from quant.errors import BelowBar, OutputError

if TYPE_CHECKING:
    from kimi_gguf.verify.evaluation import RecordResult

_BARS = {
    "min_routing": "Least share of tokens that reach the same set of experts, 0 to 1.",
    "min_overlap": "Least share of experts in common, 0 to 1.",
    "min_top1": "Least share of positions with the same likeliest token, 0 to 1.",
    "max_kld": "Greatest mean KL divergence, in nats.",
    "max_kld_99": "Greatest 99 % quantile of the KL divergence.",
    "max_ppl_ratio": "Greatest perplexity over that of the baseline.",
    "max_router_kl": "Greatest mean KL divergence of the router's scores.",
}


def _bar_options(command: Any) -> Any:
    for name, text in reversed(_BARS.items()):
        command = click.option("--" + name.replace("_", "-"), type=float, metavar="X", help=text)(command)
    return command


class _Context(click.Context):
    """Names the command as the user does: ``kimi-gguf eval``."""

    @property
    def command_path(self) -> str:
        return super().command_path.rstrip()


class _Unnamed(click.Command):
    context_class = _Context


class _Eval(click.Group):
    """A group whose first word is a verb only when it is ``record``; anything else is a model to evaluate."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] == ["record"] else ["model", *args])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        # Help and messages call it what the user calls it: eval.
        return ("" if name == "model" else name), found, rest


@click.group(cls=_Eval, name="eval")
def command() -> None:
    """Compare a model with a baseline."""


@command.command("model", cls=_Unnamed)
@click.argument("model")
@click.option("--baseline", required=True, metavar="BASE", help="GGUF, checkpoint folder, or recorded trace.")
@click.option("--text", required=True, metavar="FILE", help="UTF-8 text to run on.")
@click.option("--engine", type=click.Choice(["stream", "llama"]), default="stream", show_default=True)
@click.option("--rpc", metavar="HOST:PORT,...", help="Workers of the llama engine.")
@click.option("--tokens", type=int, metavar="N", help="Stop after N tokens.")
@click.option("--context", type=int, metavar="N", help=f"Tokens per chunk; {DEFAULT_CONTEXT}, or the trace's.")
@click.option("--teacher-forced", is_flag=True, help="Give each layer of MODEL the baseline's hidden states.")
@click.option("--preset", type=click.Choice(["official", "llama.cpp"]), help="Whose conventions the models run by.")
@click.option("--report", metavar="FILE.json", help="Write the report as JSON too.")
@click.option("--html", metavar="FILE.html", help="Write the report as a page with plots.")
@_bar_options
@stream_options
@output_options
def evaluate_command(
    model: str, as_json: bool, quiet: bool, rpc: str | None, report: str | None, html: str | None, **flags: Any
) -> int:
    """Compare MODEL, a GGUF (first file of a split set), with a baseline: routing, hidden states, output.

    Exits with 3 when a bar given by --min-... or --max-... is missed.

    `kimi-gguf eval record BASE --text FILE -o base.kgtrace` runs a baseline once, for many comparisons.
    """
    # Here, as torch is an extra: the help works without it.
    from kimi_gguf.verify.evaluation import evaluate

    console = console_for(as_json, quiet)
    bars = Bars(**{name: flags.pop(name) for name in _BARS})
    if report is not None:
        check_outfile(Path(report), "eval report", begins_with(b'"kind": "kimi-gguf eval"'))
    if html is not None:
        check_outfile(Path(html), "page", begins_with(GENERATOR.encode()))
    with console.stages() as progress:
        found = evaluate(model, rpc=_endpoints(rpc), bars=bars, progress=progress, note=console.note, **flags)
    # First of all what may have taken hours is shown; the disk may be full by now.
    console.result(found.to_dict(), report_text(found), quiet=_essence(found.to_dict()))
    console.warnings((*found.flags, *(f"below the bar: {sentence}" for sentence in found.below_bar)))
    try:
        if report is not None:
            _write(Path(report), json.dumps(found.to_dict(), indent=1) + "\n")
        if html is not None:
            _write(Path(html), page(found))
    except OutputError as fault:
        # With --json the one object is out.
        Console().fault(fault)
        return fault.exit_code
    return BelowBar.exit_code if found.below_bar else 0


@command.command("record")
@click.argument("base")
@click.option("--text", required=True, metavar="FILE", help="UTF-8 text to run on.")
@click.option("-o", "--outfile", required=True, metavar="FILE", help="The trace, by custom FILE.kgtrace.")
@click.option("--engine", type=click.Choice(["stream", "llama"]), default="stream", show_default=True)
@click.option("--rpc", metavar="HOST:PORT,...", help="Workers of the llama engine.")
@click.option("--tokens", type=int, metavar="N", help="Stop after N tokens.")
@click.option("--context", type=int, default=DEFAULT_CONTEXT, show_default=True, metavar="N", help="Tokens per chunk.")
@click.option("--top", type=int, default=DEFAULT_TOP, show_default=True, metavar="K", help="Tokens kept per position.")
@click.option(
    "--preset",
    type=click.Choice(["official", "llama.cpp"]),
    default="official",
    show_default=True,
    help="Whose conventions the model runs by.",
)
@stream_options
@output_options
def record_command(base: str, as_json: bool, quiet: bool, rpc: str | None, **flags: Any) -> None:
    """Run the baseline BASE once and keep what comparisons need."""
    from kimi_gguf.verify.evaluation import record

    console = console_for(as_json, quiet)
    with console.stages() as progress:
        result = record(base, rpc=_endpoints(rpc), progress=progress, note=console.note, **flags)
    console.result(result.to_dict(), _record_text(result), quiet=str(result.path))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with disk_faults(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def _endpoints(rpc: str | None) -> list[str]:
    return [endpoint.strip() for endpoint in (rpc or "").split(",") if endpoint.strip()]


def _essence(found: dict[str, Any]) -> str:
    routing, output = found["routing"], found["output"]
    parts = [] if routing is None else [f"routing {routing['exact']['value']:.6f}"]
    parts += [] if output is None else [f"KL {output['kl']['value']:.6g}"]
    return "  ".join(parts)


def _record_text(result: RecordResult) -> str:
    return (
        f"{result.path}: {result.tokens} tokens in {result.chunks} chunks of {result.context}, "
        f"{result.token_bytes:,} bytes per token, {result.nbytes:,} bytes"
    )
