"""``kimi-gguf runtime build`` and ``kimi-gguf runtime info``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kimi_gguf.cli.options import console_for, output_options
from kimi_gguf.cluster import runtime
from kimi_gguf.console_steps import StageBar


@click.group()
def command() -> None:
    """The patched llama.cpp that runs Kimi K3 and K3.1 Pro: build it, show it."""


@command.command(short_help="Build the runtime and make it the one in use.")
@click.option("--cuda", is_flag=True, help="Build the CUDA backend too.")
@click.option("--vulkan", is_flag=True, help="Build the Vulkan backend too.")
@click.option("--metal", is_flag=True, help="Build the Metal backend too.")
@click.option(
    "--cmake-arg", "cmake_args", multiple=True, metavar="-DNAME=VALUE", help="A further CMake option. Repeatable."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once; by default what the machine allows.")
@click.option(
    "--sdist",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The source archive of llama-cpp-python, instead of fetching it with pip.",
)
@click.option("--force", is_flag=True, help="Build again even if this build is there.")
@output_options
def build(as_json: bool, quiet: bool, **flags: Any) -> None:
    """Build the runtime and make it the one in use; does nothing when this very build is there."""
    console = console_for(as_json, quiet)
    with StageBar(console) as progress:
        built = runtime.build(progress=progress, **flags)
    value = runtime.info()
    console.result(value, f"runtime: {built.root}", quiet=str(built.root))


@command.command(short_help="Show what is built, and where.")
@output_options
def info(as_json: bool, quiet: bool) -> None:
    """Show what is built: llama.cpp's commit, patches, backends, RPC protocol, folders."""
    value = runtime.info()
    console_for(as_json, quiet).result(value, _text(value), quiet=value["root"])


def _text(value: dict[str, Any]) -> str:
    lines = [
        f"llama.cpp   {value['commit'][:9]} with {len(value['patches'])} patches:",
        *(f"              {name}" for name in value["patches"]),
        f"needed by   builds before {value['needs_no_patch']}",
        f"backends    {', '.join(value['backends'])}",
        f"RPC         protocol {'.'.join(map(str, value['rpc_protocol']))}",
        f"bindings    llama_cpp {value['bindings']} in {value['python']}",
        f"programs    {', '.join(value['programs'])}",
        f"            in {value['binaries']}",
    ]
    if value["cmake_args"]:
        lines.insert(-2, f"options     {' '.join(value['cmake_args'])}")
    return "\n".join(lines)
