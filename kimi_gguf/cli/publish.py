"""``kimi-gguf publish DIR|FILE... REPO``."""

from __future__ import annotations

from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.console import table
from kimi_gguf.publish.run import Publication, publish_model
from kimi_gguf.sizes import human_bytes


@click.command()
@click.argument("paths", nargs=-1, required=True)
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make it private; refuse a repository that is there and public.")
@click.option("--create", is_flag=True, help="Make the repository, or the branch, if it is missing.")
@click.option("--revision", metavar="BRANCH", help="The branch; main without it.")
@click.option(
    "--as-you-go",
    is_flag=True,
    help="Commit each GGUF file by itself, and REMOVE it here once the Hub has confirmed its hash. Manifest, reports, "
    "importance matrix and README.md stay.",
)
@click.option(
    "--require", metavar="REPORT.json", help="Refuse unless this eval report is of these very files and holds its bars."
)
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, and the model card, and stop.")
@output_options
def command(paths: tuple[str, ...], as_json: bool, quiet: bool, **flags: Any) -> None:
    """Publish what PATHS hold in the repository REPO (owner/name) on the Hub: GGUF files, each quant in a folder of
    its name, with manifest, eval report, importance matrix, and a model card.

    What the Hub holds already is not sent again: the same command continues what was interrupted. Hand-written text
    of the model card is kept.
    """
    console = console_for(as_json, quiet)
    result = publish_model(paths, note=console.note, **flags)
    console.warnings(result.warnings)
    console.result(result.to_dict(), publication_text(result), quiet=result.address)


def publication_text(result: Publication) -> str:
    """The files and where they are; of a dry run the model card too."""
    rows = [(f.path, human_bytes(f.nbytes), f.state) for f in result.files]
    files = table(("file", ">size", "on the Hub"), rows)
    if result.commit is not None:
        return f"{files}\n\n{result.address}: commit {result.commit}, all hashes confirmed"
    made = "" if result.exists else " (to be created)"
    return (
        f"{result.address}{made}: {human_bytes(result.upload_bytes)} to upload, at most {result.commits} commits\n\n"
        f"{files}\n\nREADME.md:\n\n{result.readme}"
    )
