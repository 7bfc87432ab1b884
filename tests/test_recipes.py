"""Recipes against llama-quantize's own assignments, floors, overrides, fallbacks, and what a plan tells about them.

``data/llama_quantize_k3_types.json`` was recorded from ``llama-quantize --dry-run`` of llama.cpp (the version that
``runtime_patches`` names, unpatched) on a header of the released K3 shapes: per recipe, with and without an importance
matrix, tensors and bytes by type, and the SHA-256 of the sorted lines "name type".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from convert.shapes import released_config, released_specs
from quant.errors import UsageError
from quant.recipe_report import costs_more, dominant_type, growths, missing_importance, substitutions
from quant.recipe_rules import facts_of, fit_rows, mixture, walk_order
from quant.recipes import RECIPES, Assignment, assign, resolve
from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType, nbytes

Q = QuantType
Cls = TensorClass

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "llama_quantize_k3_types.json").read_text()
)
# Tensor bytes at the released K3.1 shapes by llama.cpp's own rules.
K31_BYTES = {
    "Q5_K_M": 1_972_845_769_088,
    "Q4_K_M": 1_681_769_701_760,
    "Q4_K_S": 1_578_435_412_352,
    "Q3_K_L": 1_435_810_636_928,
    "Q3_K_M": 1_325_049_554_048,
    "Q2_K": 1_008_998_456_192,
    "Q2_K_S": 938_218_126_208,
    "IQ4_XS": 1_494_662_368_640,
}


def released(shape: str) -> list[RecipeTensor]:
    return [
        RecipeTensor(s.name, s.cls, s.shape, s.layer, s.source_type) for s in released_specs(released_config(shape))
    ]


K3, K31 = released("k3"), released("k3.1-pro")


def total(tensors: Sequence[RecipeTensor], assignments: Sequence[Assignment]) -> int:
    return sum(nbytes(a.qtype, t.shape) for t, a in zip(tensors, assignments, strict=True))


def tiny(columns: int = 256, experts: int = 4, source: str = "MXFP4") -> list[RecipeTensor]:
    """Two KDA layers with experts, one MLA layer with an indexer, and the globals; in no particular order."""
    out = [
        RecipeTensor("output.weight", Cls.OUTPUT, (512, columns), None, "BF16"),
        RecipeTensor("token_embd.weight", Cls.EMBEDDING, (512, columns), None, "BF16"),
        RecipeTensor("output_norm.weight", Cls.NORM, (columns,), None, "BF16"),
        RecipeTensor("blk.2.attn_k_b.weight", Cls.MLA_ABSORBED, (4, 64, 32), 2, "BF16"),
        RecipeTensor("blk.2.indexer.proj.weight", Cls.INDEXER_WEIGHTS, (8, columns), 2, "BF16"),
        RecipeTensor("blk.2.indexer.attn_k.weight", Cls.INDEXER, (32, columns), 2, "BF16"),
    ]
    for layer in range(2):
        at = f"blk.{layer}"
        out += [
            RecipeTensor(f"{at}.ffn_gate_inp.weight", Cls.ROUTER, (experts, columns), layer, "BF16"),
            RecipeTensor(f"{at}.ssm_conv1d_q.weight", Cls.KDA_CONV, (1, columns, 1, 4), layer, "F32"),
            RecipeTensor(f"{at}.ssm_f_b.weight", Cls.KDA_LOW_RANK, (columns, 128), layer, "BF16"),
            RecipeTensor(f"{at}.attn_v.weight", Cls.KDA_PROJECTION, (columns, columns), layer, "BF16"),
            RecipeTensor(f"{at}.ffn_down_exps.weight", Cls.ROUTED_EXPERT, (experts, 64, columns), layer, source),
            RecipeTensor(f"{at}.ffn_up_exps.weight", Cls.ROUTED_EXPERT, (experts, 64, columns), layer, source),
        ]
    return out


def types(recipe: str, tensors: Sequence[RecipeTensor], **options: Any) -> dict[str, Assignment]:
    result = assign(recipe, tensors, n_layers=3, has_imatrix=False, **options)
    return {t.name: a for t, a in zip(tensors, result, strict=True)}


@pytest.mark.parametrize("has_imatrix", [False, True], ids=["plain", "imatrix"])
@pytest.mark.parametrize("recipe", RECORDED)
def test_without_floors_every_tensor_has_the_type_that_llama_quantize_gives_it(recipe: str, has_imatrix: bool) -> None:
    recorded = RECORDED[recipe].get("any") or RECORDED[recipe]["imatrix" if has_imatrix else "plain"]
    assignments = assign(recipe, K3, n_layers=93, has_imatrix=has_imatrix, floors=False)
    by_type: dict[str, list[int]] = {}
    for tensor, assignment in zip(K3, assignments, strict=True):
        sums = by_type.setdefault(assignment.qtype.name, [0, 0])
        sums[0] += 1
        sums[1] += nbytes(assignment.qtype, tensor.shape)
    assert by_type == recorded["types"]
    lines = sorted((t.name, a.qtype.name) for t, a in zip(K3, assignments, strict=True))
    assert hashlib.sha256("".join(f"{n} {q}\n" for n, q in lines).encode()).hexdigest() == recorded["sha256"]


def test_every_recipe_of_llama_quantize_is_recorded() -> None:
    ours = {"MXFP4", "MXFP4_MOE", "Q3_K_XL", "Q2_K_XL"}
    assert set(RECORDED) == set(RECIPES) - ours


@pytest.mark.parametrize("recipe", K31_BYTES)
def test_sizes_at_the_released_k31_shapes_are_llama_cpp_s_but_for_the_floors(recipe: str) -> None:
    plain = assign(recipe, K31, n_layers=93, has_imatrix=False, floors=False)
    assert total(K31, plain) == K31_BYTES[recipe]
    floored = assign(recipe, K31, n_layers=93, has_imatrix=False)
    changed = substitutions(K31, floored)
    assert total(K31, floored) - K31_BYTES[recipe] == sum(s.extra_bytes for s in changed)
    assert {(s.cls, s.qtype, s.reason.split(" of ")[0]) for s in changed} == {
        (Cls.INDEXER_WEIGHTS, Q.F32, "floor"),
        (Cls.INDEXER, Q.Q8_0, "floor"),
        (Cls.KDA_LOW_RANK, Q.Q8_0, "floor"),
        (Cls.MLA_ABSORBED, Q.Q8_0, "floor"),
    }


def test_the_floors_cost_what_their_tensors_cost() -> None:
    floored = assign("Q4_K_M", K31, n_layers=93, has_imatrix=False)
    # 24 layers of [32, 7168] at 32 instead of 8.5 bits, on top of all floors counted with that tensor at Q8_0.
    assert total(K31, floored) - K31_BYTES["Q4_K_M"] == 317_472_768 + 24 * 32 * 7168 * (32 - 8.5) / 8


def test_mxfp4_has_the_bytes_of_the_lossless_file() -> None:
    assignments = assign("MXFP4", K31, n_layers=93, has_imatrix=False)
    assert total(K31, assignments) == 1_561_518_856_576
    assert [s for s in substitutions(K31, assignments) if s.cls is not Cls.INDEXER_WEIGHTS] == []


def test_mxfp4_moe_keeps_experts_and_puts_the_dense_side_in_q8_0() -> None:
    assignments = assign("mxfp4_moe", K31, n_layers=93, has_imatrix=False)
    kinds = {(t.cls, a.qtype) for t, a in zip(K31, assignments, strict=True)}
    assert (Cls.ROUTED_EXPERT, Q.MXFP4) in kinds and (Cls.MLA_ABSORBED, Q.Q8_0) in kinds
    assert {q for cls, q in kinds if cls is Cls.ROUTER} == {Q.F32}
    assert total(K31, assignments) == 1_508_727_980_416


@pytest.mark.parametrize(("recipe", "experts", "edge"), [("Q3_K_XL", Q.Q3_K, Q.Q4_K), ("Q2_K_XL", Q.Q2_K, Q.Q3_K)])
def test_xl_recipes_raise_down_projections_of_the_first_and_last_eighth(
    recipe: str, experts: QuantType, edge: QuantType
) -> None:
    assignments = assign(recipe, K31, n_layers=93, has_imatrix=False)
    downs = {t.layer: a.qtype for t, a in zip(K31, assignments, strict=True) if t.name.endswith("ffn_down_exps.weight")}
    assert [layer for layer, qtype in downs.items() if qtype is edge] == [*range(1, 11), *range(81, 93)]
    dense = {a.qtype for t, a in zip(K31, assignments, strict=True) if t.cls is not Cls.ROUTED_EXPERT}
    assert dense == {Q.Q8_0, Q.F32} and set(downs.values()) == {experts, edge}


def test_names_and_aliases_are_found_in_any_case() -> None:
    assert resolve("q4_k").name == resolve("Q4_K_M").name == "Q4_K_M"
    assert (resolve("fp16").name, resolve("F16").file_type, resolve("mxfp4").file_type) == ("F16", 1, 38)
    with pytest.raises(UsageError, match="unknown quantization 'Q9'"):
        resolve("Q9")


def test_types_do_not_depend_on_the_order_of_the_list() -> None:
    facts = facts_of(K3, 93, False)
    forward = mixture("Q4_K_M", K3, facts)
    assert mixture("Q4_K_M", K3[::-1], facts) == forward[::-1]


def test_the_walk_goes_by_layer_and_then_by_name_with_globals_first() -> None:
    names = ["blk.10.a.weight", "output.weight", "blk.9.b.weight", "blk.9.a.weight"]
    tensors = [RecipeTensor(n, Cls.NORM, (1,), None, "F32") for n in names]
    assert [names[i] for i in walk_order(tensors)] == [names[1], names[3], names[2], names[0]]


def test_exactly_eight_experts_raise_the_attention_projections() -> None:
    eight = [a for n, a in types("Q4_K_M", tiny(experts=8)).items() if n.endswith("attn_v.weight")]
    four = [a for n, a in types("Q4_K_M", tiny(experts=4)).items() if n.endswith("attn_v.weight")]
    assert {a.qtype for a in eight} == {Q.Q8_0} and Q.Q8_0 not in {a.qtype for a in four}


@pytest.mark.parametrize(
    ("qtype", "columns", "fitted"),
    [
        (Q.Q4_K, 512, Q.Q4_K),
        (Q.Q4_K, 128, Q.Q5_0),
        (Q.Q2_K, 128, Q.Q4_0),
        (Q.Q6_K, 32, Q.Q8_0),
        (Q.IQ3_S, 96, Q.IQ4_NL),
        (Q.Q5_K, 100, Q.F16),
        (Q.MXFP4, 48, Q.F16),
        (Q.BF16, 7, Q.BF16),
    ],
)
def test_rows_that_are_not_whole_blocks_fall_back(qtype: QuantType, columns: int, fitted: QuantType) -> None:
    assert fit_rows(qtype, columns) is fitted


def test_a_fallback_is_reported_and_can_be_refused() -> None:
    tensors = tiny(columns=288)
    chosen = types("Q4_K_M", tensors)["blk.0.ffn_up_exps.weight"]
    assert chosen == Assignment(Q.Q5_0, Q.Q4_K, "fallback: rows of 288 are not whole Q4_K blocks")
    with pytest.raises(UsageError, match="and 4 more cannot have the type of the recipe"):
        types("Q4_K_M", tensors, allow_fallback=False)
    types("Q4_K_M", tiny(columns=256), allow_fallback=False)


def test_floors_hold_in_the_smallest_recipe_and_name_the_class() -> None:
    chosen = types("IQ1_S", tiny())
    assert chosen["blk.0.ffn_gate_inp.weight"] == Assignment(Q.F32, Q.F32)
    assert chosen["blk.0.ssm_conv1d_q.weight"] == Assignment(Q.F32, Q.F32)
    assert chosen["blk.2.indexer.proj.weight"] == Assignment(Q.F32, Q.IQ1_S, "floor of indexer head weights")
    assert chosen["blk.2.indexer.attn_k.weight"] == Assignment(Q.Q8_0, Q.IQ1_S, "floor of indexer")
    assert chosen["blk.1.ssm_f_b.weight"] == Assignment(Q.Q8_0, Q.IQ1_S, "floor of KDA low-rank")
    assert chosen["blk.2.attn_k_b.weight"] == Assignment(Q.Q8_0, Q.IQ1_S, "floor of MLA absorbed")


def test_a_floor_needs_no_fallback_of_its_own_when_rows_are_narrow() -> None:
    assert types("Q4_K_M", tiny(), allow_fallback=False)["blk.0.ssm_f_b.weight"].qtype is Q.Q8_0


def test_the_first_override_that_is_found_wins_and_case_is_ignored() -> None:
    chosen = types("Q4_K_M", tiny(), overrides=[(r"BLK\.0\.ffn_\S+_exps", Q.Q5_K), ("exps", Q.Q6_K)])
    assert chosen["blk.0.ffn_up_exps.weight"] == Assignment(Q.Q5_K, Q.Q4_K, "override")
    assert chosen["blk.1.ffn_up_exps.weight"].qtype is Q.Q6_K


def test_an_overridden_tensor_is_not_counted_by_the_walk() -> None:
    values = [RecipeTensor(f"blk.{i}.attn_v.weight", Cls.KDA_PROJECTION, (256, 256), i, "BF16") for i in range(5)]

    def kinds(overrides: list[tuple[str, QuantType]]) -> list[QuantType]:
        result = assign("Q3_K_M", values, n_layers=5, has_imatrix=False, overrides=overrides)
        return [a.qtype for a in result]

    # The first two value projections of the walk get Q5_K.
    assert kinds([]) == [Q.Q5_K, Q.Q5_K, Q.Q4_K, Q.Q4_K, Q.Q4_K]
    assert kinds([(r"blk\.1\.", Q.Q8_0)]) == [Q.Q5_K, Q.Q8_0, Q.Q5_K, Q.Q4_K, Q.Q4_K]


def test_output_and_embedding_types_win_over_expressions() -> None:
    chosen = types(
        "Q4_K_M", tiny(), output_type=Q.Q8_0, embedding_type=Q.Q5_K, overrides=[("output|token|exps", Q.Q6_K)]
    )
    assert chosen["output.weight"].qtype is Q.Q8_0 and chosen["token_embd.weight"].qtype is Q.Q5_K


def test_overrides_work_in_float_and_lossless_recipes_too() -> None:
    assert types("MXFP4", tiny(), overrides=[("attn_v", Q.Q8_0)])["blk.0.attn_v.weight"].qtype is Q.Q8_0


@pytest.mark.parametrize(
    ("pattern", "qtype"),
    [
        ("ffn_gate_inp", Q.BF16),
        ("indexer.proj", Q.F16),
        ("indexer.attn_k", Q.Q6_K),
        ("ssm_f_b", Q.Q4_0),
        (".*", Q.Q4_0),
    ],
)
def test_an_override_below_a_floor_is_refused_unless_forced(pattern: str, qtype: QuantType) -> None:
    with pytest.raises(UsageError, match="is below its floor") as refused:
        types("Q8_0", tiny(), overrides=[(pattern, qtype)])
    assert refused.value.hint is not None and "--force" in refused.value.hint
    forced = [a for a in types("Q8_0", tiny(), overrides=[(pattern, qtype)], force=True).values() if a.reason]
    assert any("forced below the floor" in (a.reason or "") and a.qtype is qtype for a in forced)


def test_vectors_norms_and_convolutions_stay_f32_even_when_forced() -> None:
    chosen = types("Q8_0", tiny(), overrides=[(".*", Q.Q4_0)], force=True)
    assert chosen["output_norm.weight"].qtype is Q.F32 and chosen["blk.0.ssm_conv1d_q.weight"].qtype is Q.F32


@pytest.mark.parametrize(
    ("pattern", "qtype", "message"),
    [
        ("ffn_down_expz", Q.Q4_K, "fits no tensor whose type can be chosen"),
        ("output_norm", Q.Q4_K, "fits no tensor whose type can be chosen"),
        ("blk(", Q.Q4_K, "is not a regular expression"),
        ("exps", Q.Q8_K, "Q8_K cannot be written"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(pattern: str, qtype: QuantType, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        types("Q4_K_M", tiny(), overrides=[(pattern, qtype)])


def test_bf16_experts_of_a_fine_tune_become_mxfp4_and_the_loss_is_told() -> None:
    chosen = types("MXFP4", tiny(source="BF16"))["blk.0.ffn_up_exps.weight"]
    assert chosen == Assignment(Q.MXFP4, Q.MXFP4, "rounded: the source is BF16")


def test_a_table_of_types_is_a_recipe_and_keeps_the_floors() -> None:
    tensors = tiny()
    table = {n: a.qtype for n, a in types("Q4_K_M", tensors, floors=False).items() if a.qtype is not Q.F32}
    result = assign(table, tensors, n_layers=3, has_imatrix=False)
    assert [a.qtype for a in result] == [a.qtype for a in types("Q4_K_M", tensors).values()]
    with pytest.raises(UsageError, match=r"names no type for token_embd\.weight"):
        assign({n: q for n, q in table.items() if n != "token_embd.weight"}, tensors, n_layers=3, has_imatrix=False)
    with pytest.raises(UsageError, match=r"names blk\.9\.x\.weight, which this model does not have"):
        assign({**table, "blk.9.x.weight": Q.Q4_K}, tensors, n_layers=3, has_imatrix=False)


def test_growth_against_the_checkpoint_is_told_by_class() -> None:
    assert costs_more("MXFP4", Q.Q4_K) and not costs_more("MXFP4", Q.IQ4_XS) and not costs_more("BF16", Q.BF16)
    found = growths(K31, assign("Q4_K_M", K31, n_layers=93, has_imatrix=False))
    assert {(g.cls, g.source_type, g.qtype) for g in found} == {
        (Cls.ROUTED_EXPERT, Q.MXFP4, Q.Q4_K),
        (Cls.ROUTED_EXPERT, Q.MXFP4, Q.Q6_K),
    }
    assert sum(g.count for g in found) == 3 * 92
    assert growths(K31, assign("MXFP4", K31, n_layers=93, has_imatrix=False)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_that_need_an_importance_matrix_are_those_that_llama_cpp_refuses_without(recipe: str) -> None:
    missing = missing_importance(recipe, K31, assign(recipe, K31, n_layers=93, has_imatrix=False), ())
    assert bool(missing) == RECIPES[recipe].needs_imatrix
    assert not {"token_embd.weight", "output.weight"} & set(missing)


def test_an_entry_for_every_needy_tensor_is_enough() -> None:
    assignments = assign("IQ2_XS", K31, n_layers=93, has_imatrix=True)
    needy = missing_importance("IQ2_XS", K31, assignments, ())
    assert missing_importance("IQ2_XS", K31, assignments, set(needy[1:])) == needy[:1]


def test_the_dominant_type_is_that_of_the_experts() -> None:
    assert dominant_type(K31, assign("Q2_K_XL", K31, n_layers=93, has_imatrix=False)) is Q.Q2_K
