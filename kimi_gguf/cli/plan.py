"""``kimi-gguf plan [SRC] [--quant TYPE]...``."""

from __future__ import annotations

from typing import Any

import click

from kimi_gguf import api
from kimi_gguf.cli.options import console_for, output_options, recipe_options
from kimi_gguf.reports import plan_text, plans_value


@click.command()
@click.argument("src", required=False)
@click.option(
    "--quant", multiple=True, metavar="TYPE", help="A recipe, for example Q4_K_M. Repeatable; every recipe without it."
)
@click.option("--shape", metavar="NAME", help="k3 or k3.1-pro: a released model, without its files.")
@recipe_options
@output_options
def command(src: str | None, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Show what converting the checkpoint SRC, a folder or a repository on the Hub, would give; nothing is written.

    Without SRC the current folder is taken. Only headers and small files are read, and for --target-size
    a sample of the weights.
    """
    console = console_for(as_json, quiet)
    with console.progress() as progress:
        plans = api.plan(src, measured=progress.measured, **flags)
    # The table says what concerns one recipe of several.
    console.warnings(w for w in plans[0].warnings if all(w in plan.warnings for plan in plans))
    # The one thing of a plan that can be put to use again: a text recipe.
    recipe = plans[0].table.rstrip()
    console.result(plans_value(plans, flags["shape"]), plan_text(plans, flags["shape"]), quiet=recipe)
