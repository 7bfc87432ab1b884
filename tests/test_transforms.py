"""Transforms against plain numpy, whole and in any ranges of rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from convert.domain import TensorSpec
from convert.transforms import TRANSFORMS, Array, chunks, row_count, source_names
from quant.errors import ValueFault
from quant.tensors import Bf16Rows, F32Rows, Mxfp4Rows, Rows, TensorClass
from tests.memory_source import MemorySource

RNG = np.random.default_rng(7)


def bits(*shape: int) -> Array:
    """BF16 bits of finite values."""
    return RNG.integers(0, 0x7F00, shape, dtype=np.uint16)


def floats(array: Array) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32)


def spec(transform: str, shape: tuple[int, ...], *sources: str, experts: int = 0) -> TensorSpec:
    return TensorSpec("blk.0.t", shape, TensorClass.NORM, 0, sources, transform, "BF16", experts)


def plain(rows: Rows) -> Array:
    match rows:
        case Bf16Rows():
            return rows.bits
        case F32Rows():
            return rows.values
        case Mxfp4Rows():
            return np.concatenate([rows.packed, rows.scales], axis=1)


def rows_of(source: MemorySource, tensor: TensorSpec, begin: int, end: int) -> Array:
    transform = TRANSFORMS[tensor.transform]
    arrays = []
    for operand in transform.reads(tensor, source.tensors, begin, end):
        data = bytearray(operand.nbytes)
        at = 0
        for offset, size in operand.ranges:
            source.read_into(operand.shard, offset, memoryview(data)[at : at + size])
            at += size
        arrays.append(np.frombuffer(data, operand.dtype).reshape(operand.shape))
    return plain(transform.apply(tensor, arrays))


def in_pieces(source: MemorySource, tensor: TensorSpec, weights: int) -> Array:
    pieces = [rows_of(source, tensor, a, b) for a, b in chunks(tensor, 0, row_count(tensor), weights)]
    return np.concatenate(pieces)


@pytest.mark.parametrize("weights", [1, 40, 1 << 20])
def test_copy_keeps_bits(weights: int) -> None:
    values = bits(13, 8)
    source = MemorySource({"w": ("BF16", values)})
    assert np.array_equal(in_pieces(source, spec("copy", (13, 8), "w"), weights), values)


def test_copy_flattens_convolutions() -> None:
    values = RNG.standard_normal((6, 1, 4), dtype=np.float32)
    source = MemorySource({"w": ("F32", values)})
    assert np.array_equal(in_pieces(source, spec("copy", (1, 6, 1, 4), "w"), 8), values.reshape(6, 4))


def test_product_is_taken_in_float32() -> None:
    norm, projection = bits(32), RNG.standard_normal((1, 32), dtype=np.float32)
    source = MemorySource({"n": ("BF16", norm), "p": ("F32", projection)}, [["p"], ["n"]])
    result = in_pieces(source, spec("product", (32,), "n", "p"), 1 << 20)
    assert np.array_equal(result, floats(norm)[None] * projection)
    assert result.dtype == np.float32


def test_decay_takes_one_entry_per_head() -> None:
    logs = np.array([0.0, -3.5, 2.25, 99.0], dtype=np.float32)
    source = MemorySource({"a": ("F32", logs)})
    result = in_pieces(source, spec("decay", (3,), "a"), 1 << 20)
    expected = np.array([[-math.exp(0.0), -math.exp(-3.5), -math.exp(2.25)]], dtype=np.float32)
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 100.0])
def test_decay_refuses_what_float32_cannot_hold(bad: float) -> None:
    source = MemorySource({"a": ("F32", np.array([0.0, bad], dtype=np.float32))})
    with pytest.raises(ValueFault, match="A_log holds"):
        in_pieces(source, spec("decay", (2,), "a"), 1 << 20)


@pytest.mark.parametrize("weights", [1, 20, 1 << 20])
def test_kv_b_splits_into_transposed_keys_and_values(weights: int) -> None:
    heads, keys, values, latent = 3, 4, 2, 5
    fused = bits(heads * (keys + values), latent)
    source = MemorySource({"kv": ("BF16", fused)})
    by_head = fused.reshape(heads, keys + values, latent)
    found_keys = in_pieces(source, spec("head_keys", (heads, latent, keys), "kv"), weights)
    found_values = in_pieces(source, spec("head_values", (heads, values, latent), "kv"), weights)
    assert np.array_equal(found_keys.reshape(heads, latent, keys), by_head[:, :keys].transpose(0, 2, 1))
    assert np.array_equal(found_values.reshape(heads, values, latent), by_head[:, keys:])
    read = sorted((begin, end) for _, begin, end in source.reads)
    assert read[0][0] == 0 and read[-1][1] == fused.nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(read)), "each byte is read once"


@pytest.mark.parametrize("weights", [1, 100, 1 << 20])
def test_packed_experts_stack_codes_with_their_scales(weights: int) -> None:
    tensors = {}
    for expert in range(3):
        tensors[f"e{expert}.packed"] = ("U8", RNG.integers(0, 256, (4, 32), dtype=np.uint8))
        tensors[f"e{expert}.scale"] = ("F8_E8M0", RNG.integers(100, 130, (4, 4), dtype=np.uint8))
    order = [["e2.packed", "e0.scale"], ["e1.scale", "e1.packed"], ["e2.scale", "e0.packed"]]
    source = MemorySource(tensors, order)
    stack = spec("packed_experts", (3, 4, 64), "e{e}.packed", "e{e}.scale", experts=3)
    expected = np.concatenate(
        [np.concatenate([tensors[f"e{e}.packed"][1], tensors[f"e{e}.scale"][1]], axis=1) for e in range(3)]
    )
    assert np.array_equal(in_pieces(source, stack, weights), expected)
    assert list(source_names(stack, 4, 9)) == ["e1.packed", "e1.scale", "e2.packed", "e2.scale"]


def test_zeros_read_nothing() -> None:
    source = MemorySource({})
    assert np.array_equal(in_pieces(source, spec("zeros", (5,)), 1 << 20), np.zeros((1, 5)))


def test_chunks_stay_within_the_parts_of_a_tensor() -> None:
    tensor = spec("head_keys", (4, 6, 8), "kv")
    assert list(chunks(tensor, 0, 24, 1 << 20, parts=4)) == [(0, 6), (6, 12), (12, 18), (18, 24)]
    assert list(chunks(tensor, 0, 24, 1 << 20)) == [(0, 24)]
