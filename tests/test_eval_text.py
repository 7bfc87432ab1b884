"""Text to tokens for an evaluation: cuts of long runs as Kimi's tokenizer makes them, and faults of vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from convert.config import parse_config
from convert.source import open_source
from convert.vocab import load_vocab
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.reference.gguf_maker import make_gguf
from kimi_gguf.verify.text import _pieces, checkpoint_vocabulary, gguf_vocabulary, read_tokens
from quant.errors import InputError, UsageError

LONGEST = 25_000


def plain_cuts(text: str) -> Iterator[str]:
    """The rule said once more, character by character: a run of one kind is cut after 25,000 of them."""
    start, length = 0, 0
    for i, character in enumerate(text):
        same = i > 0 and character.isspace() == text[i - 1].isspace()
        length = length + 1 if same else 1
        if length > LONGEST:
            yield text[start:i]
            start, length = i, 1
    yield text[start:]


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "x" * LONGEST + " y",
        "x" * (LONGEST + 1) + " y",
        "in front " + "x" * 3 * LONGEST + " " * 2 * LONGEST + "\n" * 7 + "y" * 10,
        " " * (LONGEST + 3) + "z",
    ],
    ids=["short", "just fits", "one too long", "several", "spaces first"],
)
def test_long_runs_are_cut_as_the_tokenizer_cuts_them(text: str) -> None:
    assert list(_pieces(text)) == list(plain_cuts(text))


def test_very_long_texts_are_cut_by_length_first() -> None:
    text = "word " * 200_000
    assert [len(piece) for piece in _pieces(text)] == [400_000, 400_000, 200_000]


def test_a_gguf_without_kimis_vocabulary_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", TinyShape(vision=False), seed=1)
    source = open_source(checkpoint)
    config = parse_config(source.read_file("config.json") or b"")
    # Its 128 ASCII tokens do not cover all bytes, so no text of other scripts could be written with them.
    gguf = make_gguf(tmp_path / "m.gguf", config, seed=1)
    with pytest.raises(InputError):
        gguf_vocabulary(gguf)
    vocabulary = checkpoint_vocabulary(source)
    assert len(vocabulary.ranks) == len(load_vocab(source, config).tokens) - 256


def test_texts_that_are_no_text(tmp_path: Path) -> None:
    source = open_source(make_checkpoint(tmp_path / "c", TinyShape(vision=False), seed=1))
    vocabulary = checkpoint_vocabulary(source)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good \xff bad")
    with pytest.raises(InputError, match="byte 5 is not UTF-8"):
        read_tokens(bad, vocabulary, 768, context=8)
    bad.write_bytes(b"a")
    with pytest.raises(UsageError, match="1 tokens; at least 2"):
        read_tokens(bad, vocabulary, 768, context=8)
