"""Hashes taken side by side are those of hashlib, at any cut of the stream."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from quant.digest import crc32c, file_digest, fnv1a64
from quant.tensors import U8Array

RNG = np.random.default_rng(5)


def data(size: int) -> U8Array:
    return RNG.integers(0, 256, size, dtype=np.uint8)


def slow_crc32c(raw: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_has_its_check_value() -> None:
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
def test_crc32c_is_that_of_the_definition_and_continues(size: int) -> None:
    array = data(size)
    cut = size // 3
    assert crc32c(array) == slow_crc32c(array.tobytes())
    assert crc32c(array[cut:], crc32c(array[:cut])) == crc32c(array)


@pytest.mark.parametrize("plain", [False, True])
def test_every_length_of_a_stream_has_the_right_hash(plain: bool) -> None:
    for size in range(260):
        array = data(size)
        digest = file_digest(plain=plain)
        digest.pass_by(array)
        assert digest.end() == hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_whole_and_parts_at_any_cut(plain: bool, seed: int) -> None:
    rng = random.Random(seed)
    digest, whole = file_digest(plain=plain), b""
    for _ in range(rng.randrange(1, 5)):
        between = data(rng.randrange(0, 200))
        digest.pass_by(between)
        whole += between.tobytes()
        part, checksum = b"", 0
        for _ in range(rng.randrange(0, 6)):
            piece = data(rng.choice([0, 1, 31, 32, 63, 64, 65, 100, 4096, 5001]))
            checksum = digest.take(piece, checksum)
            part += piece.tobytes()
        whole += part
        assert checksum == crc32c(np.frombuffer(part, np.uint8))
        assert digest.end_part() == hashlib.sha256(part).hexdigest()
    assert digest.end() == hashlib.sha256(whole).hexdigest()


def test_fnv1a64_has_its_published_value_and_continues() -> None:
    assert fnv1a64(np.frombuffer(b"foobar", np.uint8)) == 0x85944171F73967E8
    assert fnv1a64(np.frombuffer(b"bar", np.uint8), fnv1a64(np.frombuffer(b"foo", np.uint8))) == 0x85944171F73967E8
