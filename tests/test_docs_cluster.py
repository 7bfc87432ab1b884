"""docs/cluster.md: each command gives the output that stands below it, and the figures are the program's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from convert.shapes import released_config
from kimi_gguf.cli import run
from kimi_gguf.cli.cluster_plan import command
from kimi_gguf.cluster.memory import Load, layer_caches

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "cluster.md").read_text()
FILES = dict(re.findall(r"```toml (\S+)\n(.*?)```", TEXT, re.DOTALL))
SHOWN = dict(re.findall(r"```console\n\$ (kimi-gguf cluster plan .*?)\n(.*?)\n```", TEXT, re.DOTALL))


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_gives_what_is_shown(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    run(shlex.split(line)[1:])
    captured = capsys.readouterr()
    assert (captured.out + captured.err).rstrip() == SHOWN[line]


def test_the_figures_of_the_text_are_those_of_the_released_shape() -> None:
    config = released_config("k3.1-pro")
    load = Load(1_048_576)
    mla, indexer, state = map(
        sum, zip(*(layer_caches(config, layer, load) for layer in range(config.n_layers)), strict=True)
    )
    for figure in (f"{mla / 1e9:.2f} GB", f"{indexer / 1e9:.2f} GB", f"{state / 1e6:.1f} MB"):
        assert figure in TEXT
    assert f"{mla / 1e9:.2f} + {indexer / 1e9:.2f} = {(mla + indexer) / 1e9:.2f} GB" in TEXT
    assert f"{24 * 2 * 512 * 2 * 1_048_576 / 1e9:.1f} GB" in TEXT


def test_every_flag_of_plan_and_every_measured_case_is_told() -> None:
    flags = {option for p in command.params if isinstance(p, click.Option) for option in p.opts} - {"-q", "--quiet"}
    assert all(f"`{flag}" in TEXT or f"[{flag}" in TEXT for flag in flags)
    cases = json.loads((ROOT / "tests" / "data" / "compute_buffers.json").read_text())
    assert f"{len(cases)} measured cases" in TEXT
