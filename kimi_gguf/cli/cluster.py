"""``kimi-gguf cluster``: several machines. One module per sub-verb, imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

SUBVERBS = {
    "plan": "Plan which machine holds which part of a model, from headers only.",
    "worker": "Run an RPC worker here, supervised.",
    "doctor": "Check workers before loading: reach, build, memory, links, numbers of a small model.",
}
"""Sub-verbs and what they do; NAME is ``command`` of the module ``kimi_gguf.cli.cluster_NAME``."""


class _Subverbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBVERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBVERBS:
            return None
        command: click.Command = import_module(f"kimi_gguf.cli.cluster_{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(SUBVERBS.items()))


@click.group(cls=_Subverbs)
def command() -> None:
    """Several machines: run workers, and check them."""
