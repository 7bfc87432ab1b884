"""Sizes of the released shapes: llama.cpp's own totals, plus our floors to the byte."""

from __future__ import annotations

import pytest

from kimi_gguf import plan
from kimi_gguf.plan_summary import grouped
from quant.errors import UsageError
from quant.recipes import RECIPES

# Tensor data at the released K3.1 Pro shapes by llama.cpp's rules, from its quantizer's dry run.
LLAMA_CPP = {
    "Q5_K_M": 1_972_845_769_088,
    "Q4_K_M": 1_681_769_701_760,
    "Q4_K_S": 1_578_435_412_352,
    "Q3_K_L": 1_435_810_636_928,
    "Q3_K_M": 1_325_049_554_048,
    "Q2_K": 1_008_998_456_192,
    "Q2_K_S": 938_218_126_208,
    "IQ4_XS": 1_494_662_368_640,
}


def test_the_lossless_file_of_the_release_has_its_known_size() -> None:
    (row,) = plan(shape="k3.1-pro", quant="mxfp4")
    assert row.sizes.total.nbytes == 1_561_518_856_576
    assert row.sizes.experts.bits == 4.25
    assert not row.grows_experts


@pytest.mark.parametrize("quant", LLAMA_CPP)
def test_sizes_are_those_of_llama_cpp_plus_the_floors_to_the_byte(quant: str) -> None:
    (row,) = plan(shape="k3.1-pro", quant=quant)
    assert row.sizes.total.nbytes - row.added_bytes == LLAMA_CPP[quant]
    assert {change.reason for change in row.changes} == {
        "floor of indexer",
        "floor of indexer head weights",
        "floor of KDA low-rank",
        "floor of MLA absorbed",
    }


def test_one_call_sizes_every_recipe_and_tells_which_grow() -> None:
    rows = {row.quant: row for row in plan(shape="k3")}
    assert list(rows) == list(RECIPES)
    assert rows["Q4_K_M"].grows_experts and not rows["Q3_K_M"].grows_experts
    assert {name for name, row in rows.items() if row.needs_imatrix} >= {"Q2_K_S", "IQ1_S", "IQ3_XXS"}


def test_flags_change_a_released_shape_too() -> None:
    (plain,) = plan(shape="k3", quant="Q4_K_M")
    (changed,) = plan(shape="k3", quant="Q4_K_M", tensor_type=["ffn_down_exps=Q8_0"])
    assert changed.sizes.total.nbytes > plain.sizes.total.nbytes
    assert "override" in {change.reason for change in changed.changes}


def test_groups_fold_the_layers_away_and_keep_the_sums() -> None:
    (row,) = plan(shape="k3", quant="Q2_K")
    groups = grouped(row.changes)
    assert sum(g.tensors for g in groups) == len(row.changes)
    assert sum(g.added for g in groups) == row.added_bytes
    assert {g.pattern: g.tensors for g in groups}["blk.*.ssm_f_b.weight"] == 69


def test_a_checkpoint_and_a_shape_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude"):
        plan("somewhere", shape="k3")
