"""Split pattern, BPE trainer and ``tiktoken.model``."""

from __future__ import annotations

import pytest
import tiktoken

from kimi_gguf.reference import tokenizer
from quant.errors import InputError

TEXT = "the cat sat on the mat; the cats' mat isn't the hat's.  THE END\n\n 12345 月之暗面 moon\n"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the cat isn't", ["the", " cat", " isn't"]),
        ("月之暗面abc", ["月之暗面", "abc"]),
        ("1234567", ["123", "456", "7"]),
        ("a  b \n c", ["a", " ", " b", " \n", " c"]),
        ("wait... what?\n\nOh", ["wait", "...", " what", "?\n\n", "Oh"]),
        ("fooBar HTTPServer", ["foo", "Bar", " HTTPServer"]),
    ],
)
def test_text_is_cut_before_merging(text: str, pieces: list[str]) -> None:
    assert tokenizer.split(text) == pieces


def test_our_split_is_the_one_that_tiktoken_uses() -> None:
    ranks = {bytes([b]): b for b in range(256)}
    for piece in tokenizer.split(TEXT):
        ranks.setdefault(piece.encode(), len(ranks))
    encoding = tiktoken.Encoding("pieces", pat_str=tokenizer.PATTERN, mergeable_ranks=ranks, special_tokens={})
    whole = [encoding.decode_single_token_bytes(i).decode() for i in encoding.encode_ordinary(TEXT)]
    assert whole == tokenizer.split(TEXT)


def test_training_merges_the_most_frequent_pairs_first() -> None:
    ranks = tokenizer.train_ranks(TEXT * 3, 262)
    assert ranks[:256] == [bytes([b]) for b in range(256)]
    assert ranks[256:260] == [b"at", b"th", b"the", b" the"]
    assert len(set(ranks)) == 262


def test_a_trained_vocabulary_round_trips_through_its_file() -> None:
    ranks = tokenizer.train_ranks(TEXT * 3, 280)
    model = tokenizer.dump_ranks(ranks)
    assert tokenizer.parse_ranks(model) == ranks
    encoding = tokenizer.encoding(model)
    assert encoding.decode(encoding.encode_ordinary(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("model", "message"), [(b"!!! 0\n", "line 1 is not"), (b"YQ== 0\nYg== 5\n", "line 2 has rank 5, expected 1")]
)
def test_a_damaged_file_is_refused(model: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tokenizer.parse_ranks(model)
