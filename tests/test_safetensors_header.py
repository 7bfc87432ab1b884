"""safetensors headers: what is read, and what is refused with one message."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shard_samples import entry, parse, shard_bytes

from convert.safetensors_header import MAX_HEADER_BYTES, parse_header
from quant.errors import InputError

TWO = {"a": entry("U8", [4, 8], 0, 32), "b": entry("F32", [3], 32, 44)}


def refused(content: bytes) -> str:
    with pytest.raises(InputError) as caught:
        parse(content)
    assert "model-00001-of-000001.safetensors" in caught.value.message
    return caught.value.message


def test_tensors_come_in_the_order_of_their_data_with_offsets_from_the_file_start():
    content = shard_bytes({"b": TWO["b"], "a": TWO["a"]}, 44)
    base = len(content) - 44
    a, b = parse(content)
    assert (a.name, a.dtype, a.shape, a.begin, a.end) == ("a", "U8", (4, 8), base, base + 32)
    assert (b.name, b.dtype, b.shape, b.begin, b.end) == ("b", "F32", (3,), base + 32, base + 44)


def test_a_file_of_the_safetensors_library_is_read_alike():
    tensors = {
        "m": np.arange(12, dtype=np.float32).reshape(3, 4),
        "v": np.arange(5, dtype=np.uint8),
        "scalar": np.array(2.0, dtype=np.float16),
        "none": np.zeros((0, 7), dtype=np.float32),
    }
    content = safetensors.numpy.save(tensors, metadata={"format": "pt", "brace": "}{]["})
    for tensor in parse(content):
        array = tensors[tensor.name]
        assert tensor.shape == array.shape
        assert content[tensor.begin : tensor.end] == array.tobytes()


def test_members_in_any_order_and_any_white_space_mean_the_same():
    text = ' {"a" :\n{ "data_offsets":[0 ,32], "shape" : [4,8],"dtype":"U8" } , "b": ' + json.dumps(TWO["b"]) + " } "
    assert parse(shard_bytes(text, 44))[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("BF16", [2, 3], 12), ("F16", [3], 6), ("F8_E8M0", [7], 7), ("F4", [2, 8], 8), ("I64", [1], 8), ("BOOL", [3], 3)],
)
def test_bytes_follow_from_dtype_and_shape(dtype: str, shape: list[int], nbytes: int):
    assert parse(shard_bytes({"t": entry(dtype, shape, 0, nbytes)}, nbytes))[0].nbytes == nbytes
    message = refused(shard_bytes({"t": entry(dtype, shape, 0, nbytes + 1)}, nbytes + 1))
    assert f"{nbytes} bytes" in message and str(nbytes + 1) in message


@pytest.mark.parametrize("missing", [1, 20, 44])
def test_a_shard_that_ends_early_names_expected_and_actual_bytes(missing: int):
    content = shard_bytes(TWO, 44)
    message = refused(content[:-missing])
    assert "truncated" in message and str(len(content)) in message and str(len(content) - missing) in message


def test_a_shard_with_bytes_after_its_data_is_refused():
    assert "describes" in refused(shard_bytes(TWO, 45))


@pytest.mark.parametrize("content", [b"", b"\x10", b"\x00" * 7])
def test_a_file_shorter_than_its_length_prefix_is_refused(content: bytes):
    refused(content)


@pytest.mark.parametrize("length", [45, MAX_HEADER_BYTES + 1, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_or_the_cap_is_refused_without_reading_it(length: int):
    content = struct.pack("<Q", length) + b"{}" + bytes(10)
    asked = []

    def read(offset: int, count: int) -> bytes:
        asked.append(count)
        return content[offset : offset + count]

    with pytest.raises(InputError, match=str(length if length > 45 else 53)):
        parse_header(read, "x.safetensors", len(content))
    assert max(asked) < 100


def test_a_git_lfs_pointer_says_how_to_fetch_the_file():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    with pytest.raises(InputError) as caught:
        parse(pointer)
    assert caught.value.hint is not None and "git lfs pull" in caught.value.hint


@pytest.mark.parametrize(
    ("header", "data", "word"),
    [
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)}, 7, "overlaps"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4, "overlaps"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 5, 9)}, 9, "gap"),
        ({"a": entry("U8", [4], 1, 5)}, 5, "gap"),
        ({"a": entry("U8", [4], 4, 0)}, 4, "begin <= end"),
        ({"a": entry("U8", [1 << 62], 0, 1 << 62)}, 4, "truncated"),
        ({"a": entry("U8", [-4], 0, 4)}, 4, "shape"),
        ({"a": entry("U8", [4], -4, 0)}, 4, "data_offsets"),
        ({"a": entry("U8", [4.0], 0, 4)}, 4, "shape"),
        ({"a": entry("U8", [True], 0, 1)}, 1, "shape"),
        ({"a": entry("U8", ["4"], 0, 4)}, 4, "shape"),
        ({"a": entry("U8", 4, 0, 4)}, 4, "shape"),
        ({"a": entry("U8", [1 << 63], 0, 4)}, 4, "shape"),
        ({"a": entry("U8", [4], 0, 10**400)}, 4, "data_offsets"),
        ({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}, 0, "bytes"),
        ({"a": entry("U8", [1] * 9, 0, 1)}, 1, "9 dimensions"),
        ({"a": entry("U7", [4], 0, 4)}, 4, "unknown dtype"),
        ({"a": entry(None, [4], 0, 4)}, 4, "dtype"),
        ({"a": entry(["U8"], [4], 0, 4)}, 4, "dtype"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "members"),
        ({"a": entry("U8", [4], 0, 4) | {"x": 1}}, 4, "members"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, 4, "3 data_offsets"),
        ({"a": 5}, 0, "not a short JSON object"),
        ({"a\n": entry("U8", [4], 0, 4)}, 4, "control characters"),
        ({"a\x1b[31m": entry("U8", [4], 0, 4)}, 4, "control characters"),
        ({"": entry("U8", [4], 0, 4)}, 4, "0 characters"),
        ({"n" * 2000: entry("U8", [4], 0, 4)}, 4, "2000 characters"),
    ],
)
def test_an_entry_that_does_not_describe_the_file_is_refused(header: dict[str, object], data: int, word: str):
    assert word in refused(shard_bytes(header, data))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"a"',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}} x',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},}',
        '{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"shape":[4]}}',
        '{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":' + "[" * 3000 + "}}",
        '{"__metadata__":' + "[" * 200_000,
        '{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        '{"\\q":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b"\xff\xfe{}",
    ],
)
def test_broken_json_is_one_message(text: str | bytes):
    refused(shard_bytes(text, 4))


def test_a_name_that_occurs_twice_is_refused():
    one = json.dumps(TWO["a"])
    assert "tensor a occurs twice" in refused(shard_bytes(f'{{"a":{one},"a":{one}}}', 32))


def test_the_hash_is_of_the_json_alone():
    content = shard_bytes(TWO, 44)
    digest = parse_header(lambda offset, length: content[offset : offset + length], "x", len(content))[1]
    assert digest == hashlib.sha256(json.dumps(TWO).encode()).hexdigest()


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_header_bytes_are_tensors_or_an_input_error(text: bytes):
    survives(shard_bytes(text, 16))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MEMBER = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 20), min_size=2, max_size=2) | JSON,
    },
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), MEMBER | JSON, max_size=4), st.integers(0, 40))
def test_any_json_header_is_tensors_or_an_input_error(header: dict[str, object], data: int):
    survives(shard_bytes(header, data))


@settings(max_examples=400)
@example(0, 0)
@given(st.integers(0, 400), st.integers(0, 255))
def test_what_is_accepted_after_a_damaged_byte_the_safetensors_library_accepts_too(at: int, value: int):
    content = bytearray(shard_bytes(TWO, 44))
    content[at % len(content)] = value
    if survives(bytes(content)):
        assert len(safetensors.deserialize(bytes(content))) == 2


def survives(content: bytes) -> bool:
    """Whether ``content`` is read; an exception other than InputError fails the test."""
    try:
        tensors = parse(content)
    except InputError as error:
        str(error).encode()
        return False
    assert sum(t.nbytes for t in tensors) <= len(content)
    return True
