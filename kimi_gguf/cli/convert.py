"""``kimi-gguf convert [SRC] --quant TYPE``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.domain import Plan, Source
from kimi_gguf import api
from kimi_gguf.cli.options import console_for, output_options, recipe_options
from kimi_gguf.console import Console
from kimi_gguf.plan_summary import summarize
from kimi_gguf.reports import conversion_text, conversion_value, plan_text, plans_value
from kimi_gguf.sources import DEFAULT_REPO, HOW_TO_NAME, holds_checkpoint
from quant.errors import KimiGgufError, UsageError

if TYPE_CHECKING:
    from kimi_gguf.hub.budget import ShardNeed


@click.command()
@click.argument("src", required=False)
@click.option("--quant", metavar="TYPE", help="The recipe, for example MXFP4 or Q4_K_M.")
@recipe_options
@click.option("--max-disk", metavar="N(M|G|T)", help="Most bytes that output and fetched shards may take together.")
@click.option("--keep-shards", is_flag=True, help="Keep the shards that are fetched from the Hub.")
@click.option("--download-dir", metavar="DIR", help="Where to fetch shards; NAME.shards beside the output without it.")
@click.option("--publish", metavar="REPO", help="Publish the result in this repository (owner/name) on the Hub.")
@click.option("--as-you-go", is_flag=True, help="Publish each file when it is complete, and remove it here.")
@click.option("--create", is_flag=True, help="Make the repository to publish in, if it is missing.")
@click.option("--private", is_flag=True, help="Make it private; refuse one that is there and public.")
@click.option("--threads", type=int, metavar="N", help="Workers; all processors that may be used without it.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option("--overwrite", is_flag=True, help="Replace finished files, and what an earlier run left half done.")
@click.option("--yes", is_flag=True, help="Answer every question with yes.")
@output_options
def command(src: str | None, yes: bool, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Convert the checkpoint SRC to GGUF: a folder, or a repository on the Hub (owner/name@revision).

    Without SRC the checkpoint in the current folder is meant; if there is none, the released model on the Hub, after
    its plan has been shown and with your consent. An interrupted conversion is continued by the same command.
    """
    console = console_for(as_json, quiet, yes=yes)
    if not any(flags[way] for way in ("quant", "recipe", "target_size")):
        raise UsageError("nothing says which types to write", "give --quant, --recipe or --target-size")
    unnamed = src is None and not holds_checkpoint(Path.cwd())
    if unnamed:
        if not (yes or console.attended or flags["dry_run"]):
            raise UsageError(
                "no checkpoint is named, and the current folder holds none",
                f"{HOW_TO_NAME}; or give --yes to convert {DEFAULT_REPO}, fetched shard by shard",
            )
        src = DEFAULT_REPO

    def on_plan(plan: Plan) -> None:
        console.warnings(plan.warnings)
        if flags["dry_run"]:
            return
        summary = summarize(plan)
        if unnamed:
            console.note(plan_text([summary], None))
            _ask(
                console, f"No checkpoint is named. Fetch {DEFAULT_REPO} shard by shard, and convert it?", default=False
            )
        if summary.grows_experts:
            _ask(console, "The experts take more bits than the checkpoint gives them. Continue?")

    with console.progress() as progress:

        def on_need(source: Source, need: ShardNeed) -> None:
            progress.fetching(need.total)
            console.note(
                f"{source.origin}: {need.total:,} bytes of shards to fetch, at most {need.ahead:,} on disk at once"
            )

        result = api.convert(
            src,
            progress=progress,
            on_plan=on_plan,
            on_need=on_need,
            note=console.note,
            fetched=progress.fetched,
            **flags,
        )
    if flags["dry_run"]:
        plans = [summarize(result.plan)]
        console.result(plans_value(plans, None), plan_text(plans, None), quiet=plans[0].table.rstrip())
        return
    files = "\n".join(str(path) for path in result.files)
    console.result(conversion_value(result), conversion_text(result), quiet=files)


def _ask(console: Console, question: str, *, default: bool = True) -> None:
    if not console.confirm(question, default=default):
        raise KimiGgufError("stopped as asked; nothing was written")
