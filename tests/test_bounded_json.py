"""JSON of strangers: what it may not hold, and what the message says."""

from __future__ import annotations

import json

import pytest

from convert.bounded_json import load_object
from quant.errors import InputError


def refused(data: bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        load_object(data, "config.json")
    assert caught.value.message.startswith("config.json: ")
    return caught.value


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": "\xff"}', "not UTF-8 text (byte 7)"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "a number of 100000 digits"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 1}', "'a' occurs twice"),
        (b"[" * 1000, "nested 1000 deep"),
        (b"[]", "a JSON list"),
        (rb'{"a": "\ud800"}', r"\ud800 is half of a surrogate pair"),
        (rb'{"a": {"\uDC00": [1]}}', r"\udc00 is half of a surrogate pair"),
    ],
)
def test_what_is_no_plain_object_is_one_message_with_a_next_step(data: bytes, word: str) -> None:
    fault = refused(data)
    assert word in fault.message
    assert fault.hint


def test_whole_surrogate_pairs_and_long_numbers_are_read() -> None:
    assert load_object(rb'{"a": "\ud83d\ude42", "b": ' + b"9" * 400 + b"}", "f") == {"a": "🙂", "b": 10**400 - 1}
    assert load_object(json.dumps({"a": "\\ud800"}).encode(), "f") == {"a": "\\ud800"}
