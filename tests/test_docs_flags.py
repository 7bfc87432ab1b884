"""Documentation and command line name the same flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kimi_gguf.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
FENCED = re.findall(r"^```[^\n]*\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def verbs(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        # `eval MODEL` has no word of its own.
        yield (path if (*path, name) == ("eval", "model") else (*path, name)), command
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))


COMMANDS = dict(verbs(cli))
LINES = sorted(
    {
        line.strip().removeprefix("$ ")
        for block in FENCED
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip().removeprefix("$ ").startswith("kimi-gguf ")
    }
)


def flags(command: click.Command) -> set[str]:
    options = (p for p in command.params if isinstance(p, click.Option))
    return {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"-h", "--help"}


def test_every_flag_is_told_somewhere() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXT))
    longs = {flag for command in COMMANDS.values() for flag in flags(command) if flag.startswith("--")}
    assert longs - named - {"--help"} == set()


@pytest.mark.parametrize("line", LINES)
def test_a_command_that_is_shown_has_a_verb_and_its_flags(line: str) -> None:
    # What follows two spaces or a # is said about it.
    words = re.sub(r"[\[\]]|\.\.\.", " ", re.split(r"  |#", line)[0]).split()[1:]
    for length in (2, 1):
        if tuple(words[:length]) in COMMANDS:
            break
    command = COMMANDS[tuple(words[:length])]
    ours = words[length : words.index("--") if "--" in words else None]
    assert {word.partition("=")[0] for word in ours if re.match(r"--?[a-z]", word)} <= flags(command)
