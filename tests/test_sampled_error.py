"""What types cost: measured on rows from all over a tensor, weighed by what a token meets."""

from __future__ import annotations

from itertools import pairwise
from threading import Event

import gguf
import numpy as np
import pytest

from convert.domain import TensorSpec
from convert.sampled_error import SAMPLED_WEIGHTS, Sampled, measure, places, relative_error, weight_in_sum
from convert.shapes import released_config, released_specs
from convert.transforms import TRANSFORMS, row_count
from quant import ggml
from quant.errors import ValueFault
from quant.recipe_rules import quantizable
from quant.tensors import F32Array, F32Rows, RecipeTensor, TensorClass
from quant.types import QuantType
from tests.memory_source import MemorySource

Q = QuantType
CONFIG = released_config("k3.1-pro")
SPECS = {spec.name: spec for spec in released_specs(CONFIG)}


def chosen() -> list[TensorSpec]:
    recipe = [RecipeTensor(s.name, s.cls, s.shape, s.layer, s.source_type) for s in SPECS.values()]
    return [spec for spec, tensor in zip(SPECS.values(), recipe, strict=True) if quantizable(tensor)]


def test_a_sample_of_the_release_is_bounded_and_each_range_lies_in_one_matrix() -> None:
    for spec in chosen():
        found = places(spec)
        matrix = spec.shape[-2] if len(spec.shape) == 3 else row_count(spec)
        quantum = TRANSFORMS[spec.transform].quantum(spec)
        assert 0 < sum(end - begin for begin, end in found) * spec.shape[-1] <= SAMPLED_WEIGHTS
        assert all(
            begin % quantum == 0 == end % quantum and begin // matrix == (end - 1) // matrix for begin, end in found
        )
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        assert found[0][0] >= 0 and found[-1][1] <= row_count(spec)


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_stack_is_looked_at_in_all_its_parts(part: str) -> None:
    spec = SPECS[f"blk.5.ffn_{part}_exps.weight"]
    rows = spec.shape[1]
    found = places(spec)
    assert [begin // rows * 16 // 896 for begin, _ in found] == list(range(16))
    assert len({begin % rows * 8 // rows for begin, _ in found}) >= 6


def test_rows_of_a_dense_matrix_are_not_the_same_row_of_every_head() -> None:
    found = places(SPECS["blk.0.attn_q.weight"])
    assert len({begin % 128 for begin, _ in found}) == len(found) == 8


def test_what_a_token_meets_decides_how_much_a_tensor_counts() -> None:
    weights = {name: weight_in_sum(SPECS[name], CONFIG) for name in SPECS if not name.startswith("blk.")}
    assert weights["output.weight"] == weights["token_embd.weight"] == 93
    layer = {
        "attn_q.weight": 1,
        "attn_output.weight": 1,
        "ffn_up_shexp.weight": 1 / 2,
        "ffn_routed_up.weight": 1 / 2,
        "ffn_up_exps.weight": 1 / 32,
    }
    assert {stem: weight_in_sum(SPECS[f"blk.1.{stem}"], CONFIG) for stem in layer} == layer


@pytest.mark.parametrize("qtype", [Q.Q8_0, Q.Q4_K, Q.Q2_K])
def test_the_error_is_the_share_of_the_squares_that_is_lost(qtype: Q) -> None:
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal((2, 512)).astype(np.float32) * scale for scale in (1, 3)]
    lost = held = 0.0
    for part in parts:
        back = gguf.quants.dequantize(ggml.encode(part, qtype, None), qtype)
        lost += float(np.square(part - back, dtype=np.float64).sum())
        held += float(np.square(part, dtype=np.float64).sum())
    samples = [Sampled(0, F32Rows(part), None) for part in parts]
    assert relative_error(samples, qtype, "ggml") == pytest.approx(lost / held, rel=1e-5)


def test_importance_counts_between_columns_and_not_between_experts() -> None:
    rng = np.random.default_rng(2)
    rows = [F32Rows(rng.standard_normal((2, 256)).astype(np.float32)) for _ in range(2)]
    weights = rng.lognormal(0, 2, 256).astype(np.float32)
    ones = np.ones(256, dtype=np.float32)

    def error(scale: float) -> float:
        samples = [Sampled(0, rows[0], weights * np.float32(scale)), Sampled(2, rows[1], ones)]
        return relative_error(samples, Q.Q3_K, "ggml")

    assert error(4.0) == error(1.0)
    plain = relative_error([Sampled(0, row, None) for row in rows], Q.Q3_K, "ggml")
    assert abs(error(1.0) / plain - 1) > 0.01


def dense(values: dict[str, F32Array]) -> tuple[MemorySource, list[TensorSpec]]:
    """F32 matrices as a checkpoint, and their specs."""
    source = MemorySource({name: ("F32", array) for name, array in values.items()})
    specs = [
        TensorSpec(f"blk.0.{name}.weight", array.shape, TensorClass.DENSE_FFN, 0, (name,), "copy", "F32")
        for name, array in values.items()
    ]
    return source, specs


def measured(values: dict[str, F32Array], types: tuple[Q, ...], threads: int = 1) -> list[dict[Q, float]]:
    source, specs = dense(values)
    steps: list[tuple[int, int]] = []
    result = measure(
        source,
        dict.fromkeys(specs, types),
        encoder="native",
        imatrix=None,
        threads=threads,
        measured=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(n + 1, len(specs)) for n in range(len(specs))]
    return result


def test_threads_do_not_change_the_figures() -> None:
    rng = np.random.default_rng(3)
    values = {f"w{n}": rng.standard_normal((8, 256 * n)).astype(np.float32) for n in range(1, 9)}
    types = (Q.Q2_K, Q.Q4_K, Q.Q8_0, Q.BF16, Q.F32)
    one = measured(values, types)
    assert one == measured(values, types, threads=4)
    for errors in one:
        falling = [errors[t] for t in types]
        assert falling == sorted(falling, reverse=True)
        assert falling[-2] > falling[-1] == 0


def test_a_type_that_cannot_hold_the_weights_is_left_out() -> None:
    large = np.full((2, 256), 1e20, dtype=np.float32)
    (errors,) = measured({"w": large}, (Q.Q4_K, Q.BF16, Q.F32))
    assert set(errors) == {Q.BF16, Q.F32}


def test_zeros_cost_nothing_as_any_type() -> None:
    (errors,) = measured({"w": np.zeros((2, 256), dtype=np.float32)}, (Q.Q2_K, Q.F32))
    assert errors == {Q.Q2_K: 0.0, Q.F32: 0.0}


def test_a_weight_that_no_type_holds_is_named_with_its_place() -> None:
    values = np.zeros((4, 256), dtype=np.float32)
    values[2, 5] = np.nan
    with pytest.raises(ValueFault, match=r"blk\.0\.w\.weight, row 2: .*column 5 .*not a finite.*from w in shard-0"):
        measured({"w": values}, (Q.Q4_K, Q.F32))


def test_only_the_sample_is_read() -> None:
    source, (spec,) = dense({"w": np.ones((2000, 256), dtype=np.float32)})
    measure(source, {spec: (Q.Q8_0,)}, encoder="ggml", imatrix=None, threads=1, measured=lambda done, total: None)
    assert sum(end - begin for _, begin, end in source.reads) == 4 * SAMPLED_WEIGHTS


def test_who_gives_up_does_not_wait_for_readers() -> None:
    source, specs = dense({name: np.ones((2, 256), dtype=np.float32) for name in "ab"})
    answered, read = Event(), source.read_into

    def slow(shard: int, offset: int, buffer: memoryview) -> None:
        if offset:
            answered.wait(30)
        read(shard, offset, buffer)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source.read_into = slow  # type: ignore[method-assign]
    wanted = dict.fromkeys(specs, (Q.Q8_0,))
    with pytest.raises(KeyboardInterrupt):
        measure(source, wanted, encoder="ggml", imatrix=None, threads=1, measured=interrupted)
    assert not answered.is_set()
    answered.set()
