"""Hostile and damaged GGUF headers: one message each, no memory and no time spent on claimed numbers."""

from __future__ import annotations

import itertools
import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from convert.gguf_file import MetadataEntry, TensorEntry, ValueType, lay_out
from quant.errors import InputError
from quant.gguf_cursor import StringArray
from quant.gguf_parser import parse_gguf, parse_gguf_from
from quant.types import QuantType


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(
    *, n_tensors: int = 0, n_keys: int = 0, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + body


def key(name: bytes, type_: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_) + value


def tensor(name: bytes, dims: list[int], type_: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)


HUGE = 2**63 - 1
ZEROS = b"\0" * 4096
ALIGNED_TO = {n: key(b"general.alignment", 4, struct.pack("<I", n)) for n in (0, 3, 2**31)}
HOSTILE = {
    "empty file": (b"", "not a GGUF"),
    "other magic": (header(magic=b"GGML"), "not a GGUF"),
    "version 1": (header(version=1), "version 1"),
    "version 4": (header(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut in the preamble": (header()[:10], "ends at 10"),
    "key count": (header(n_keys=HUGE, body=ZEROS), "keys"),
    "tensor count": (header(n_tensors=HUGE, body=ZEROS), "tensors"),
    "counts whose product wraps": (header(n_tensors=2**61, n_keys=2**60, body=ZEROS), "keys"),
    "key length": (header(n_keys=1, body=struct.pack("<Q", HUGE) + ZEROS), f"{HUGE} bytes"),
    "key length above 2^63": (header(n_keys=1, body=struct.pack("<Q", 2**64 - 1) + ZEROS), "bytes"),
    "empty key": (header(n_keys=1, body=key(b"", 4, b"\0" * 4) + ZEROS), "0 bytes"),
    "long key": (header(n_keys=1, body=key(b"k" * 2000, 4, b"\0" * 4) + ZEROS), "2000 bytes"),
    "key that is not UTF-8": (header(n_keys=1, body=key(b"\xff\xfe", 4, b"\0" * 4) + ZEROS), "UTF-8"),
    "duplicate key": (header(n_keys=2, body=2 * key(b"k", 4, b"\0" * 4)), "'k' occurs twice"),
    "unknown value type": (header(n_keys=1, body=key(b"k", 13, b"\0" * 8)), "unknown type 13"),
    "bool of 2": (header(n_keys=1, body=key(b"k", 7, b"\2") + ZEROS), "bool"),
    "bool array of 2": (header(n_keys=1, body=key(b"k", 9, struct.pack("<IQ", 7, 2) + b"\1\2")), "bool"),
    "string value": (header(n_keys=1, body=key(b"k", 8, struct.pack("<Q", 10**12))), "1000000000000 bytes"),
    "array length": (header(n_keys=1, body=key(b"k", 9, struct.pack("<IQ", 4, 2**62))), "elements"),
    "array bytes that wrap": (header(n_keys=1, body=key(b"k", 9, struct.pack("<IQ", 12, 2**61))), "elements"),
    "string array length": (header(n_keys=1, body=key(b"k", 9, struct.pack("<IQ", 8, 2**61)) + ZEROS), "strings"),
    "string array past the end": (header(n_keys=1, body=key(b"k", 9, struct.pack("<IQQ", 8, 1, 99))), "99|107"),
    "nested array": (header(n_keys=1, body=key(b"k", 9, struct.pack("<IQIQ", 9, 1, 4, 0))), "nested"),
    "alignment 0": (header(n_keys=1, body=ALIGNED_TO[0]), "alignment is 0"),
    "alignment 3": (header(n_keys=1, body=ALIGNED_TO[3]), "alignment is 3"),
    "alignment 2^31": (header(n_keys=1, body=ALIGNED_TO[2**31]), "alignment is 2147483648"),
    "alignment as u64": (header(n_keys=1, body=key(b"general.alignment", 10, struct.pack("<Q", 32))), "UINT64"),
    "no dimensions": (header(n_tensors=1, body=tensor(b"t", []) + ZEROS), "0 dimensions"),
    "five dimensions": (header(n_tensors=1, body=tensor(b"t", [1] * 5) + ZEROS), "5 dimensions"),
    "2^32 - 1 dimensions": (
        header(n_tensors=1, body=string(b"t") + struct.pack("<I", 2**32 - 1) + ZEROS),
        "4294967295 dimensions",
    ),
    "empty axis": (header(n_tensors=1, body=tensor(b"t", [32, 0]) + ZEROS), "empty shape"),
    "product that wraps": (header(n_tensors=1, body=tensor(b"t", [2**32, 2**32]) + ZEROS), "needs"),
    "shape of 2^64": (header(n_tensors=1, body=tensor(b"t", [2**63, 2**63, 4, 4]) + ZEROS), "needs"),
    "odd row": (header(n_tensors=1, body=tensor(b"t", [33], 39) + ZEROS), "rows of 33"),
    "unknown tensor type": (header(n_tensors=1, body=tensor(b"t", [32], 4) + ZEROS), "unknown type 4"),
    "long tensor name": (header(n_tensors=1, body=tensor(b"t" * 64, [32]) + ZEROS), "64 bytes"),
    "empty tensor name": (header(n_tensors=1, body=tensor(b"", [32]) + ZEROS), "0 bytes"),
    "duplicate tensor": (header(n_tensors=2, body=tensor(b"t", [8]) + tensor(b"t", [8], 0, 32) + ZEROS), "twice"),
    "unaligned offset": (header(n_tensors=1, body=tensor(b"t", [8], 0, 4) + ZEROS), "not a multiple of 32"),
    "offset past the end": (header(n_tensors=1, body=tensor(b"t", [8], 0, 2**40) + ZEROS), "file ends at"),
    "offset that wraps": (header(n_tensors=1, body=tensor(b"t", [8], 0, 2**64 - 32) + ZEROS), "file ends at"),
    "data short by a byte": (header(n_tensors=1, body=tensor(b"t", [8])).ljust(95, b"\0"), "file ends at 95"),
    "overlap": (header(n_tensors=2, body=tensor(b"t", [64]) + tensor(b"u", [8], 0, 32) + ZEROS), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_one_message(case: str, tmp_path: Path) -> None:
    data, expected = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError, match=expected) as caught:
        parse_gguf(path)
    assert "bad.gguf" in caught.value.message
    assert len(str(caught.value)) < 5000


GOOD_TENSORS = [
    TensorEntry("blk.0.attn_q.weight", (4, 64), QuantType.Q8_0),
    TensorEntry("blk.0.attn_norm.weight", (64,), QuantType.F32),
]
GOOD_KEYS = [
    MetadataEntry("general.architecture", ValueType.STRING, "kimi-k3"),
    MetadataEntry("tokens", ValueType.ARRAY, [f"t{n}" for n in range(50)], ValueType.STRING),
    MetadataEntry("types", ValueType.ARRAY, [3] * 50, ValueType.INT32),
]


def good_file() -> bytes:
    layout = lay_out(GOOD_KEYS, GOOD_TENSORS)
    return layout.header.ljust(layout.nbytes, b"\0")


def test_every_prefix_of_a_good_file_is_refused_with_a_message(tmp_path: Path) -> None:
    data = good_file()
    assert len(parse_gguf_from(lambda o, n: data[o : o + n], len(data), "good").tensors) == 2
    for length in range(len(data)):
        with pytest.raises(InputError):
            parse_gguf_from(lambda o, n: data[o : o + n], length, "cut")


def test_any_changed_byte_gives_a_header_or_a_message() -> None:
    data = good_file()
    random_bytes = random.Random(7)
    for _ in range(4000):
        damaged = bytearray(data)
        for _ in range(random_bytes.choice((1, 1, 2, 8))):
            damaged[random_bytes.randrange(len(damaged))] = random_bytes.choice((0, 1, 127, 128, 255))
        frozen = bytes(damaged)
        try:
            parse_gguf_from(lambda o, n: frozen[o : o + n], len(frozen), "damaged")  # noqa: B023
        except InputError:
            continue


def test_memory_follows_the_file_and_not_its_claims() -> None:
    bodies = {
        "strings": (0, 1, key(b"k", 9, struct.pack("<IQ", 8, 125_000)) + b"\0" * 1_000_000),
        "bools": (0, 1, key(b"k", 9, struct.pack("<IQ", 7, 1_000_000)) + b"\1" * 1_000_000),
        "a string": (0, 1, key(b"k", 8, struct.pack("<Q", 1_000_000)) + b"x" * 1_000_000),
    }
    for name, (n_tensors, n_keys, body) in bodies.items():
        data = header(n_tensors=n_tensors, n_keys=n_keys, body=body)
        tracemalloc.start()
        parsed = parse_gguf_from(lambda o, n: data[o : o + n], len(data), name)  # noqa: B023
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(parsed.metadata) == 1
        assert peak < 4.5 * len(data), name


def test_counts_above_the_limits_are_refused_even_when_the_file_could_hold_them() -> None:
    body = b"\0" * 2_000_000
    for n_tensors, n_keys in ((65_537, 0), (0, 16_385)):
        data = header(n_tensors=n_tensors, n_keys=n_keys, body=body)
        with pytest.raises(InputError, match="allowed"):
            parse_gguf_from(lambda o, n: data[o : o + n], len(data), "many")  # noqa: B023


def test_only_the_header_of_a_terabyte_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    entry = TensorEntry("big.weight", (1024, 1 << 28), QuantType.F32)
    layout = lay_out(GOOD_KEYS, [entry])
    path.write_bytes(layout.header)
    os.truncate(path, layout.nbytes)
    assert parse_gguf(path).file_size > 10**12
    seen = []

    def read(offset: int, n: int) -> bytes:
        seen.append((offset, n))
        return layout.header.ljust(offset + n, b"\0")[offset : offset + n]

    parse_gguf_from(read, layout.nbytes, "sparse", first_read=100)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(seen))
    assert seen[-1][0] + seen[-1][1] < 2 * len(layout.header) + 4096


def test_a_range_that_comes_back_short_is_reported() -> None:
    data = good_file()
    with pytest.raises(InputError, match="bytes came at offset"):
        parse_gguf_from(lambda o, n: data[o : o + n][:-1], len(data), "short")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(InputError):
            parse_gguf(path)


def test_strings_are_decoded_on_demand_and_compare_like_a_list() -> None:
    data = good_file()
    tokens = parse_gguf_from(lambda o, n: data[o : o + n], len(data), "good").metadata["tokens"].value
    assert isinstance(tokens, StringArray)
    assert list(tokens) == [f"t{n}" for n in range(50)]
    assert tokens[-1] == "t49" and tokens[1:3] == ["t1", "t2"]
    with pytest.raises(IndexError):
        tokens[50]
