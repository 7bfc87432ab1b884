"""docs/convert.md and docs/format.md say what the program does: sizes of recipes, flags, tensors, keys."""

from __future__ import annotations

import re
from pathlib import Path

import click

from convert.metadata import architecture_keys
from convert.shapes import released_config
from convert.tensor_table import GLOBAL_TABLE, LAYER_TABLE, dimensions, shapes
from kimi_gguf import plan
from kimi_gguf.cli import cli

DOCS = Path(__file__).parent.parent / "docs"
CONVERT = (DOCS / "convert.md").read_text()
FORMAT = (DOCS / "format.md").read_text()


def test_the_table_of_recipes_is_that_of_the_released_shape() -> None:
    rows = {
        cells[0]: cells[1:] for cells in re.findall(r"^\| (\w+) \| ([\d.,]+) \| ([\d.]+) \| ([\d.]+) \|", CONVERT, re.M)
    }
    expected = {
        row.quant: (
            f"{row.sizes.total.nbytes / 1e9:,.2f}",
            f"{row.sizes.total.bits:.3f}",
            f"{row.sizes.experts.bits:.3f}",
        )
        for row in plan(shape="k3.1-pro")
    }
    assert rows == expected


def test_every_flag_of_convert_is_in_the_table_and_no_other() -> None:
    command = cli.get_command(click.Context(cli), "convert")
    assert command is not None
    flags = {option for p in command.params if isinstance(p, click.Option) for option in p.opts}
    table = CONVERT[CONVERT.index("## Flags") : CONVERT.index("The one question")]
    assert set(re.findall(r"(?<=`)-{1,2}[a-z][a-z-]*", "\n".join(re.findall(r"^\| (.*?) \| ", table, re.M)))) == flags


def test_the_sum_that_floors_add_is_the_one_in_the_text() -> None:
    (row,) = plan(shape="k3.1-pro", quant="Q4_K_M")
    assert f"{len(row.changes)} tensors and {row.added_bytes:,} bytes" in " ".join(CONVERT.split())


def test_every_tensor_is_in_the_map_with_its_shape() -> None:
    sizes = dimensions(released_config("k3.1-pro"))
    for row in (*LAYER_TABLE, *GLOBAL_TABLE):
        shape = "x".join(map(str, shapes(row.shape, sizes)[0]))
        line = f"| `{row.name}` | {shape} |"
        assert line in FORMAT, line
        assert all(f"`{source}`" in FORMAT for source, _ in row.sources)


def test_every_key_is_in_the_list() -> None:
    text = re.sub(r"\s", "", FORMAT)
    for entry in architecture_keys(released_config("k3.1-pro")):
        bare = entry.key.partition(".")[2]
        assert bare in text or f".{bare.rpartition('.')[2]}" in text, bare
