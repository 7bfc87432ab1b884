"""``kimi-gguf convert [SRC] --quant TYPE``."""

from __future__ import annotations

from typing import Any

import click

from convert.domain import Plan
from kimi_gguf import api
from kimi_gguf.cli.options import console_for, output_options, recipe_options
from kimi_gguf.plan_summary import summarize
from kimi_gguf.reports import conversion_text, conversion_value, plan_text, plans_value
from kimi_gguf.sources import resolve_source
from quant.errors import KimiGgufError


@click.command()
@click.argument("src", required=False)
@click.option("--quant", required=True, metavar="TYPE", help="The recipe, for example MXFP4 or Q4_K_M.")
@recipe_options
@click.option("--threads", type=int, metavar="N", help="Workers; all processors that may be used without it.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option("--overwrite", is_flag=True, help="Replace finished files, and what an earlier run left half done.")
@click.option("--yes", is_flag=True, help="Answer every question with yes.")
@output_options
def command(src: str | None, yes: bool, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Convert the checkpoint in the folder SRC to GGUF; without SRC, the one in the current folder.

    An interrupted conversion is continued by the same command.
    """
    console = console_for(as_json, quiet, yes=yes)

    def on_plan(plan: Plan) -> None:
        console.warnings(plan.warnings)
        question = "The experts take more bits than the checkpoint gives them. Continue?"
        if summarize(plan).grows_experts and not flags["dry_run"] and not console.confirm(question):
            raise KimiGgufError("stopped as asked; nothing was written")

    with console.progress() as progress:
        result = api.convert(resolve_source(src), progress=progress, on_plan=on_plan, **flags)
    if flags["dry_run"]:
        plans = [summarize(result.plan)]
        console.result(plans_value(plans, None), plan_text(plans, None))
        return
    files = "\n".join(str(path) for path in result.files)
    console.result(conversion_value(result), conversion_text(result), quiet=files)
