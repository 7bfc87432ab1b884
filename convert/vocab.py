"""The tokenizer of a checkpoint, from ``tiktoken.model`` alone: tokens, types and merges as GGUF's ``gpt2`` model.

A tiktoken vocabulary has no merges: a token's rank is both its id and its priority. The merge that makes a token is
found by encoding the token's own bytes with the ranks before it, which must leave exactly two parts.
Above the ranks stand 256 special slots; ``tokenizer_config.json`` names some of them by absolute id.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf

from convert.bounded_json import AGAIN, load_object
from convert.domain import Source
from convert.model_config import ModelConfig
from quant.errors import InputError

SPECIAL_SLOTS = 256
RANKS_FILE = "tiktoken.model"
TOKENIZER_FILE = "tokenizer_config.json"
PRE_TOKENIZER = "kimi-k2"
# The released file has 2.8 MB; the cost of rebuilding merges grows with the square of a token's length.
MAX_RANKS_BYTES = 64_000_000
MAX_TOKEN_BYTES = 1024
_NORMAL = int(gguf.TokenType.NORMAL)
_CONTROL = int(gguf.TokenType.CONTROL)
_NO_RANK = 1 << 62
_EMBEDDINGS = ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Vocab:
    """A tokenizer as GGUF metadata holds it.

    Attributes:
        tokens: text of each id, ordinary ones with each byte as one printable character (GPT-2's table).
        types: GGUF token type of each id.
        merges: "left right" pairs in order of priority.
        bos, eos, pad: ids, None when the checkpoint names none.
        pre: name of the pre-tokenizer.
        warnings: what in the checkpoint's files disagrees.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int | None
    pad: int | None
    pre: str = PRE_TOKENIZER
    warnings: tuple[str, ...] = ()


def load_vocab(source: Source, config: ModelConfig) -> Vocab:
    """The vocabulary of ``source``, with as many tokens as its embedding has rows.

    Raises:
        InputError: a file missing or unsound, or another number of tokens than ``config`` or the embedding has.
    """
    data = source.read_file(RANKS_FILE)
    if data is None:
        raise InputError(f"{RANKS_FILE} is missing", "download it into the checkpoint's folder")
    ranks = parse_ranks(data)
    settings = source.read_file(TOKENIZER_FILE)
    if settings is None:
        raise InputError(
            f"{TOKENIZER_FILE} is missing: it names the special tokens", "download it into the checkpoint's folder"
        )
    count = len(ranks) + SPECIAL_SLOTS
    check_rows(count, config.vocab_size, "vocab_size in config.json")
    for name in _EMBEDDINGS:
        tensor = source.tensors.get(name)
        if tensor is not None and tensor.shape:
            check_rows(count, tensor.shape[0], f"rows of {name}")
    tokenizer = load_object(settings, TOKENIZER_FILE)
    tokens = [byte_text(token) for token in ranks] + special_names(tokenizer, ranks)
    _check_distinct(tokens, len(ranks))
    eos = config.eos if config.eos is not None else _generation_eos(source, len(tokens))
    return Vocab(
        tokens=tokens,
        types=[_NORMAL] * len(ranks) + [_CONTROL] * SPECIAL_SLOTS,
        merges=[f"{byte_text(left)} {byte_text(right)}" for left, right in rebuild_merges(ranks)],
        bos=config.bos,
        eos=eos,
        pad=config.pad,
        warnings=_disagreements(tokenizer, tokens, {"bos_token": config.bos, "pad_token": config.pad}),
    )


def check_rows(tokens: int, rows: int, what: str) -> None:
    """Checks that a vocabulary of ``tokens`` ids fits ``rows``, the value of ``what``.

    Raises:
        InputError: it does not.
    """
    if tokens != rows:
        raise InputError(
            f"{RANKS_FILE}: {tokens - SPECIAL_SLOTS} ranks and {SPECIAL_SLOTS} special slots are {tokens} tokens, "
            f"but {what} is {rows}",
            "the tokenizer files must belong to this checkpoint",
        )


def parse_ranks(data: bytes, file: str = RANKS_FILE) -> list[bytes]:
    """Byte strings of a tiktoken vocabulary in rank order, from lines of "base64 rank" in any order.

    Raises:
        InputError: a line of another form, a rank or a string twice, a gap in the ranks, a single byte without rank.
    """
    if len(data) > MAX_RANKS_BYTES:
        raise InputError(f"{file}: {len(data)} bytes, at most {MAX_RANKS_BYTES} are read", AGAIN)
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        rank, token = _rank_line(line, file, number)
        if rank in by_rank:
            raise InputError(f"{file}: line {number} gives rank {rank} a second time", AGAIN)
        by_rank[rank] = token
    gap = next((rank for rank in range(len(by_rank)) if rank not in by_rank), None)
    if gap is not None:
        raise InputError(f"{file}: rank {gap} is missing among {len(by_rank)} ranks up to {max(by_rank)}", AGAIN)
    ranks = [by_rank[rank] for rank in range(len(by_rank))]
    known: dict[bytes, int] = {}
    for rank, token in enumerate(ranks):
        other = known.setdefault(token, rank)
        if other != rank:
            raise InputError(f"{file}: ranks {other} and {rank} are the same bytes {token!r:.80}", AGAIN)
    lacking = [byte for byte in range(256) if bytes([byte]) not in known]
    if lacking:
        raise InputError(f"{file}: {len(lacking)} of 256 single bytes have no rank, the first is {lacking[0]}", AGAIN)
    return ranks


def _rank_line(line: bytes, file: str, number: int) -> tuple[int, bytes]:
    parts = line.split()
    try:
        if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > 9:
            raise ValueError
        token = base64.b64decode(parts[0], validate=True)
    except (ValueError, binascii.Error):
        raise InputError(f"{file}: line {number} is {line[:60]!r}, expected base64 and a rank", AGAIN) from None
    if not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise InputError(
            f"{file}: line {number} is a token of {len(token)} bytes, expected 1 to {MAX_TOKEN_BYTES}", AGAIN
        )
    return int(parts[1]), token


def _byte_characters() -> dict[int, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the 68 others for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {byte: 256 + n for n, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()


def byte_text(token: bytes) -> str:
    """``token`` with each byte as one character of GPT-2's table."""
    return token.decode("latin-1").translate(_BYTE_CHARACTERS)


def rebuild_merges(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token of several bytes, in rank order.

    A token that its own bytes do not lead to in one last merge has none: byte-pair encoding never makes it.
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for rank, token in enumerate(ranks):
        if len(token) == 2:
            merges.append((token[:1], token[1:]))
        elif len(token) > 2:
            bounds = _encode_below(token, rank, rank_of)
            if len(bounds) == 3:
                merges.append((token[: bounds[1]], token[bounds[1] :]))
    return merges


def _encode_below(token: bytes, limit: int, rank_of: Mapping[bytes, int]) -> list[int]:
    """Boundaries of the parts that ``token`` has after all merges of a rank below ``limit``, lowest rank first."""
    bounds = list(range(len(token) + 1))
    pairs = [rank_of.get(token[i : i + 2], _NO_RANK) for i in range(len(token) - 1)]
    while pairs:
        lowest = min(pairs)
        if lowest >= limit:
            break
        at = pairs.index(lowest)
        del pairs[at], bounds[at + 1]
        if at < len(pairs):
            pairs[at] = rank_of.get(token[bounds[at] : bounds[at + 2]], _NO_RANK)
        if at:
            pairs[at - 1] = rank_of.get(token[bounds[at - 1] : bounds[at + 1]], _NO_RANK)
    return bounds


def special_names(tokenizer: Mapping[str, Any], ranks: Sequence[bytes]) -> list[str]:
    """Names of the 256 special slots: those of ``added_tokens_decoder``, else ``<|reserved_token_ID|>``.

    Args:
        tokenizer: content of tokenizer_config.json.
        ranks: the ordinary tokens; the first special id is their number.

    Raises:
        InputError: an id outside the slots that is not an ordinary token's own, or a name that is no text.
    """
    first = len(ranks)
    names = [f"<|reserved_token_{first + slot}|>" for slot in range(SPECIAL_SLOTS)]
    decoder = tokenizer.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise InputError(f"{TOKENIZER_FILE}: added_tokens_decoder is {decoder!r:.80}, expected an object", AGAIN)
    for key, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise InputError(
                f"{TOKENIZER_FILE}: added_tokens_decoder has the key {key!r:.80}, expected a token id", AGAIN
            )
        if not isinstance(content, str) or not content.isprintable() or not content:
            raise InputError(
                f"{TOKENIZER_FILE}: token {key} has the content {content!r:.80}, expected plain text", AGAIN
            )
        slot = int(key) - first
        if 0 <= slot < SPECIAL_SLOTS:
            names[slot] = content
        elif slot >= 0 or ranks[int(key)] != content.encode():
            raise InputError(
                f"{TOKENIZER_FILE}: token {key} ({content}) is not one of the {SPECIAL_SLOTS} special ids "
                f"from {first} to {first + SPECIAL_SLOTS - 1}",
                f"ids are absolute: {RANKS_FILE} has {first} ranks",
            )
    return names


def _check_distinct(tokens: Sequence[str], first_special: int) -> None:
    """llama.cpp aborts on a file in which two ids have the same text."""
    known = {text: token for token, text in enumerate(tokens)}
    if len(known) != len(tokens):
        twice = next(token for token in range(len(tokens)) if known[tokens[token]] != token)
        raise InputError(
            f"{TOKENIZER_FILE}: tokens {twice} and {known[tokens[twice]]} have the same text {tokens[twice]!r:.80}",
            f"special tokens begin at {first_special}",
        )


def _generation_eos(source: Source, vocab_size: int) -> int | None:
    data = source.read_file("generation_config.json")
    value = load_object(data, "generation_config.json").get("eos_token_id") if data else None
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int and 0 <= value < vocab_size else None


def _disagreements(
    tokenizer: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int | None]
) -> tuple[str, ...]:
    """Special tokens whose name and id do not meet, as after tools that renumber ids to close their gaps."""
    warnings = []
    for key, number in ids.items():
        named = tokenizer.get(key)
        text = named.get("content") if isinstance(named, dict) else named
        if number is not None and isinstance(text, str) and tokens[number] != text:
            warnings.append(f"{TOKENIZER_FILE} calls {key} {text!r:.80}, but its id {number} is {tokens[number]!r:.80}")
    return tuple(warnings)
