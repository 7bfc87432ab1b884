"""The command line: one thin module per verb, loaded when its verb is called.

Exit codes: 0 ok, 1 failure, 2 usage, 3 verification below the bar, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from convert.version import VERSION
from kimi_gguf.console import Console, LostOutput
from quant.errors import KimiGgufError

INTERRUPTED = 130
DEBUG = "KIMI_GGUF_DEBUG"
EXTRAS = dict.fromkeys(("torch", "tiktoken", "regex", "safetensors"), "pip install 'kimi-gguf[reference]'")
"""Modules that only some verbs need, and how they come."""

VERBS = {
    "convert": "Convert a checkpoint to GGUF, or continue a conversion that was interrupted.",
    "plan": "Show what a conversion would give, from headers only.",
    "inspect": "Show what a GGUF file or set holds, and check its structure.",
    "eval": "Compare a model with a baseline: routing, perplexity, KL divergence; or record a baseline.",
    "imatrix": "Make an importance matrix, one layer at a time on one machine.",
    "verify": "Trace every tensor of a GGUF to its checkpoint, and compare the values.",
    "demo": "Convert the tiny K3.1 that is shipped to Q4_K_M, inspect it, let it write.",
    "publish": "Publish GGUF files on the Hub, with manifest, eval report and a model card.",
    "serve": "Serve a model with an OpenAI-compatible API, here or over RPC workers, supervised.",
    "export": "Lay a GGUF out for Ollama or LM Studio.",
    "cluster": "Several machines: run RPC workers, plan and check a cluster.",
    "runtime": "Build the patched llama.cpp that runs the models, or show what is built.",
}
"""Verbs and what they do; the verb NAME is ``command`` of the module ``kimi_gguf.cli.NAME``."""


_LAYERS = "when hidden states were on disk (--scratch DIR), the same command with --resume goes on after the last layer"
_SAME = "the same command continues where it stopped"
_CONTINUED = {"convert": _SAME, "publish": _SAME, "eval": _LAYERS, "imatrix": _LAYERS}


class Verbs(click.Group):
    """A group that imports a verb's module only when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"kimi_gguf.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    name="kimi-gguf",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, prog_name="kimi-gguf", message="%(prog)s %(version)s")
def cli() -> None:
    """Kimi K3 and K3.1 Pro checkpoints to GGUF."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; every failure is one message, in JSON when ``--json`` was given."""
    _open_streams()
    _end_politely()
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        code = run(arguments)
    except KeyboardInterrupt:
        # Another one, while the first was told.
        code = INTERRUPTED
    sys.exit(code)


def _end_politely() -> None:
    """Let SIGTERM and SIGHUP end a verb as Ctrl-C does, journal written and temporary files removed.

    A signal that is ignored, as SIGHUP under nohup, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _open_streams() -> None:
    """Point standard streams that are closed at the null device.

    An output file would get a closed stream's number, and what a library prints there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    try:
        return _run(arguments, Console("json" if "--json" in arguments else "human"))
    except LostOutput as fault:
        if not fault.unheard:
            Console().fault(fault)
        return fault.exit_code


def _run(arguments: list[str], console: Console) -> int:
    try:
        code: Any = cli.main(arguments, prog_name="kimi-gguf", standalone_mode=False)
    except LostOutput:
        raise
    except KimiGgufError as fault:
        console.fault(fault)
        return fault.exit_code
    except click.exceptions.NoArgsIsHelpError as fault:
        console.note(fault.format_message())
        return fault.exit_code
    except click.ClickException as fault:
        console.error(fault.format_message(), _usage_hint(fault), fault.exit_code)
        return fault.exit_code
    except (KeyboardInterrupt, click.Abort):
        console.error("interrupted", _CONTINUED.get(arguments[0] if arguments else ""), INTERRUPTED)
        return INTERRUPTED
    except OSError as fault:
        if os.environ.get(DEBUG):
            raise
        if isinstance(fault.filename, str | bytes):
            where, hint = f"{os.fsdecode(fault.filename)}: ", "check this path, its permissions and the disk"
        else:
            where, hint = "", f"check the disk and the connections; set {DEBUG}=1 to see where it happened"
        console.error(f"{where}{fault.strerror or fault}", hint, 1)
        return 1
    except Exception as fault:
        if os.environ.get(DEBUG):
            raise
        if isinstance(fault, ModuleNotFoundError) and fault.name in EXTRAS:
            console.error(f"this verb needs {fault.name}, which is not installed", EXTRAS[fault.name], 1)
            return 1
        what = f"{type(fault).__name__}: {fault}"
        console.error(f"unexpected failure: {what}", f"set {DEBUG}=1 to see where, and report it", 1)
        return 1
    return code if isinstance(code, int) else 0


def _usage_hint(fault: click.ClickException) -> str | None:
    context = getattr(fault, "ctx", None)
    return f"try: {context.command_path} --help" if context is not None else None
