"""The vocabulary from tiktoken.model: tokens, merges that encode as tiktoken does, special slots, hostile files."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.config import ModelConfig, parse_config
from convert.source import LocalSource, open_source
from convert.vocab import Vocab, byte_text, check_rows, load_vocab, parse_ranks, rebuild_merges, special_names
from kimi_gguf.reference.checkpoint_files import tiktoken_model, tiktoken_ranks, tokenizer_config
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import InputError

PIECES = r"\p{Han}+| ?\p{L}+(?:'\p{L}+)?| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CORPUS = [
    "the quick brown fox isn't looking, we're sure they've seen what I'd call it",
    "two  spaces,   three, and a tail   ",
    "月之暗面的模型权重会被转换成一个文件 and then 中文 mixed with English",
    "def main(): return sum(x for x in range(1234567))\n\n\ttab\r\n",
    "emoji 🙂👩‍👩‍👧 and é ü ß \u00a0 non-breaking",
    "",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny", TinyShape(layers=1, hidden=32, experts=4, dense_layers=1), sparse=True)


def load(folder: Path) -> Vocab:
    source = open_source(folder)
    return load_vocab(source, config_of(source))


def config_of(source: LocalSource) -> ModelConfig:
    text = source.read_file("config.json")
    assert text is not None
    return parse_config(text)


def encode_by_merges(piece: bytes, merges: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    """Byte-pair encoding as GGUF's gpt2 model does it: the earliest merge first."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        known = [(merges[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in merges]
        if not known:
            return parts
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def both_encodings(text: str, ranks: list[bytes]) -> tuple[list[int], list[int]]:
    oracle = tiktoken.Encoding(
        "test", pat_str=PIECES, mergeable_ranks={t: r for r, t in enumerate(ranks)}, special_tokens={}
    )
    merges = {pair: n for n, pair in enumerate(rebuild_merges(ranks))}
    ids = {token: rank for rank, token in enumerate(ranks)}
    pieces = (match[0].encode() for match in regex.finditer(PIECES, text))
    ours = [ids[part] for piece in pieces for part in encode_by_merges(piece, merges)]
    return ours, oracle.encode_ordinary(text)


@pytest.mark.parametrize("text", CORPUS)
@pytest.mark.parametrize("count", [256, 400, 2000])
def test_rebuilt_merges_encode_as_tiktoken_does(text: str, count: int):
    ours, theirs = both_encodings(text, tiktoken_ranks(count))
    assert ours == theirs


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_rebuilt_merges_encode_any_text_as_tiktoken_does(text: str):
    ours, theirs = both_encodings(text, tiktoken_ranks(700))
    assert ours == theirs


def test_each_token_of_several_bytes_is_made_by_one_merge_of_earlier_tokens():
    ranks = tiktoken_ranks(1000)
    order = {token: rank for rank, token in enumerate(ranks)}
    merges = rebuild_merges(ranks)
    assert [order[left + right] for left, right in merges] == list(range(256, 1000))
    assert all(max(order[left], order[right]) < order[left + right] for left, right in merges)


def test_the_merge_is_the_one_that_lower_ranks_lead_to():
    ranks = [bytes([b]) for b in range(256)] + [b"bc", b"ab", b"abc"]
    assert rebuild_merges(ranks) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]


def test_a_token_that_merging_never_makes_has_no_merge():
    ranks = [bytes([b]) for b in range(256)] + [b"xyz"]
    assert rebuild_merges(ranks) == []


def test_bytes_are_printable_characters_of_gpt2s_table():
    assert byte_text(b" the\n") == "ĠtheĊ"
    assert len({byte_text(bytes([b])) for b in range(256)}) == 256
    assert all(not byte_text(bytes([b])).isspace() for b in range(256))


def test_ids_are_ranks_then_256_control_slots_with_absolute_names(folder: Path):
    vocab = load(folder)
    assert len(vocab.tokens) == len(vocab.types) == 768
    assert vocab.tokens[:512] == [byte_text(token) for token in tiktoken_ranks(512)]
    assert vocab.types == [int(gguf.TokenType.NORMAL)] * 512 + [int(gguf.TokenType.CONTROL)] * 256
    assert vocab.tokens[512:516] == ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>"]
    assert vocab.tokens[520] == "<|reserved_token_520|>" and vocab.tokens[521] == "[EOT]"
    assert vocab.tokens[-2:] == ["[UNK]", "[PAD]"]
    assert len(vocab.merges) == 256 and vocab.merges[0].count(" ") == 1


def test_the_end_token_is_the_configs_not_the_tokenizers(folder: Path):
    vocab = load(folder)
    assert (vocab.bos, vocab.eos, vocab.pad, vocab.pre) == (512, 514, 767, "kimi-k2")
    assert vocab.warnings == ()


def test_an_end_token_that_the_config_lacks_comes_from_the_generation_config(folder: Path):
    source = open_source(folder)
    config = replace(config_of(source), eos=None)
    assert load_vocab(source, config).eos == 514
    (folder / "generation_config.json").unlink()
    assert load_vocab(source, config).eos is None


def test_tokens_and_embedding_rows_must_agree(folder: Path):
    source = open_source(folder)
    with pytest.raises(InputError, match="512 ranks and 256 special slots are 768 tokens, but vocab_size in config"):
        load_vocab(source, replace(config_of(source), vocab_size=1024))
    with pytest.raises(InputError, match="rows of the embedding is 5"):
        check_rows(768, 5, "rows of the embedding")
    (folder / "tiktoken.model").write_bytes(tiktoken_model(511))
    with pytest.raises(InputError, match="767 tokens"):
        load(folder)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(folder: Path, name: str):
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        load(folder)


def test_renumbered_special_tokens_are_warned_of(folder: Path):
    settings = tokenizer_config(TinyShape())
    decoder = settings["added_tokens_decoder"]
    settings["added_tokens_decoder"] = {str(512 + n): entry for n, entry in enumerate(decoder.values())}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "calls pad_token '[PAD]', but its id 767 is '<|reserved_token_767|>'" in load(folder).warnings[0]


@pytest.mark.parametrize(
    ("key", "content", "word"),
    [
        ("511", "[BOS]", "not one of the 256 special ids from 512 to 767"),
        ("768", "x", "not one of the 256"),
        ("-1", "x", "expected a token id"),
        ("five", "x", "expected a token id"),
        ("²", "x", "expected a token id"),
        ("9" * 5000, "x", "expected a token id"),
        ("520", "", "expected plain text"),
        ("520", "a\nb", "expected plain text"),
        ("520", "\ud800", "expected plain text"),
        ("520", 5, "expected plain text"),
    ],
)
def test_a_name_that_no_slot_can_bear_is_refused(key: str, content: Any, word: str):
    with pytest.raises(InputError, match=word):
        special_names({"added_tokens_decoder": {key: {"content": content}}}, tiktoken_ranks(512))


def test_an_ordinary_token_may_be_listed_under_its_own_text():
    decoder = {"added_tokens_decoder": {"97": {"content": "a"}}}
    assert special_names(decoder, tiktoken_ranks(512))[0] == "<|reserved_token_512|>"


@pytest.mark.parametrize("content", ["[BOS]", "a"])
def test_two_ids_of_the_same_text_are_refused_because_llama_cpp_aborts(folder: Path, content: str):
    settings = tokenizer_config(TinyShape())
    settings["added_tokens_decoder"]["600"] = {"content": content}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="have the same text"):
        load(folder)


GOOD = tiktoken_model(256)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (b"YWI= 257\n", "rank 256 is missing"),
        (b"YWI= 999999999\n", "rank 256 is missing"),
        (b"YWI= 255\n", "a second time"),
        (base64.b64encode(bytes([7])) + b" 7\n", "rank 7 a second time"),
        (b"YWI= 256\nYWI= 257\n", "the same bytes"),
        (b"YWI=\n", "expected base64 and a rank"),
        (b"YWI= 256 7\n", "expected base64 and a rank"),
        (b"YWI -1\n", "expected base64 and a rank"),
        (b"Y*I= 256\n", "expected base64 and a rank"),
        (b"YWI 256\n", "expected base64 and a rank"),
        (b"YWI= 1e3\n", "expected base64 and a rank"),
        (b"YWI= " + b"9" * 5000, "expected base64 and a rank"),
        (base64.b64encode(bytes(1025)) + b" 256\n", "1025 bytes"),
        (b"\x00\xff\n", "expected base64 and a rank"),
    ],
)
def test_a_line_that_is_no_rank_is_refused(extra: bytes, word: str):
    with pytest.raises(InputError, match=word):
        parse_ranks(GOOD + extra)


def test_lines_may_come_in_any_order_with_blank_ones_between():
    lines = GOOD.splitlines()
    assert parse_ranks(b"\n\n".join(reversed(lines))) == [bytes([b]) for b in range(256)]


def test_a_vocabulary_without_all_bytes_or_of_absurd_size_is_refused():
    with pytest.raises(InputError, match="256 of 256 single bytes"):
        parse_ranks(b"")
    with pytest.raises(InputError, match="64000001 bytes"):
        parse_ranks(bytes(64_000_001))


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_are_ranks_or_an_input_error(extra: bytes):
    for data in (extra, GOOD + extra):
        try:
            rebuild_merges(parse_ranks(data))
        except InputError as error:
            str(error).encode()


def test_a_vocabulary_of_the_released_size_is_rebuilt_whole():
    ranks = tiktoken_ranks(163_584)
    assert parse_ranks(tiktoken_model(163_584)) == ranks
    assert len(rebuild_merges(ranks)) == 163_584 - 256
