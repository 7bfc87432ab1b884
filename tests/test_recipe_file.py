"""Text recipes: what is written reads back, and what is no recipe is refused with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.errors import UsageError
from quant.recipe_file import MAX_BYTES, read_recipe, write_recipe
from quant.types import QuantType

Q = QuantType

NAMES = st.sampled_from(["output.weight", "token_embd.weight"]) | st.builds(
    "blk.{}.{}.weight".format, st.integers(0, 20), st.sampled_from(["attn_q", "ffn_down_exps"])
)


def test_layers_of_one_type_share_a_line() -> None:
    table = {f"blk.{i}.ffn_down_exps.weight": Q.Q4_K if i in (1, 2, 3, 7) else Q.Q3_K for i in range(1, 9)}
    assert write_recipe({**table, "output.weight": Q.Q6_K}, "2 bytes\nhand made") == (
        "# 2 bytes\n"
        "# hand made\n"
        "output.weight = Q6_K\n"
        "blk.1-3,7.ffn_down_exps.weight = Q4_K\n"
        "blk.4-6,8.ffn_down_exps.weight = Q3_K\n"
    )


@given(st.dictionaries(NAMES, st.sampled_from([Q.Q4_K, Q.Q8_0, Q.IQ3_XXS]), min_size=1))
def test_what_is_written_reads_back(table: dict[str, QuantType]) -> None:
    assert read_recipe(write_recipe(table, "a comment with = and #")) == table


def test_comments_blank_lines_and_case_are_free() -> None:
    text = "\n  # nothing\noutput.weight=q6_k   # better\n\tblk.0.a.weight =  BF16\n"
    assert read_recipe(text) == {"output.weight": Q.Q6_K, "blk.0.a.weight": Q.BF16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output.weight Q6_K", "line 1: 'output.weight Q6_K' is not NAME = TYPE"),
        ("\noutput.weight = Q9", "line 2: unknown tensor type 'Q9'"),
        ("a = Q4_K\na = Q5_K", "line 2: a has a type already, Q4_K"),
        ("blk.1-3.a = Q4_K\nblk.2.a = Q4_K", r"line 2: blk\.2\.a has a type already"),
        ("blk.3-1.a = Q4_K", "'3-1' is no layer"),
        ("blk.1-99999.a = Q4_K", "'1-99999' is no layer"),
        ("blk.1,,2.a = Q4_K", "'' is no layer"),
        ("blk.*.a = Q4_K", "has no layer numbers"),
        ("# nothing\n", "names no tensor"),
        ("x" * (MAX_BYTES + 1), f"a recipe has up to {MAX_BYTES}"),
        ("\n".join(f"blk.0-9999.a{i} = Q4_K" for i in range(9)), "line 7: more than 65536 tensors"),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(text, "my.recipe")
