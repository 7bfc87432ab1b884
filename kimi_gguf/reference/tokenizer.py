"""Kimi's tokenizer: the split pattern, a reader for ``tiktoken.model``, and a small BPE trainer.

A tiktoken vocabulary is a list of byte strings; the rank of a string is its id and its merge priority. The 256
special tokens of the release stand above the ranks and are never produced from ordinary text.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import regex
import tiktoken

from quant.errors import InputError

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is cut before merging (the release's eight alternatives, in order)."""


def split(text: str) -> list[str]:
    """The pieces of ``text`` inside which merges happen; joined they are ``text`` again."""
    return [m[0] for m in regex.finditer(PATTERN, text, flags=regex.V1)]


def train_ranks(text: str, size: int) -> list[bytes]:
    """Byte-pair encoding of ``text``: ``size`` byte strings in rank order, the 256 bytes first.

    The most frequent pair is merged next, ties to the smaller pair of byte strings, so the result is a pure
    function of its arguments. A pair whose joined bytes are already a token is passed over: each string has one rank.
    """
    words = Counter(piece.encode() for piece in split(text))
    parts = [[bytes([b]) for b in word] for word in words]
    counts = list(words.values())
    ranks = [bytes([b]) for b in range(256)]
    known = set(ranks)
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for i, word in enumerate(parts):
        for pair in pairwise(word):
            pairs[pair] += counts[i]
            where[pair].add(i)
    while len(ranks) < size:
        best = max(pairs, key=lambda p: (pairs[p], (p[0], p[1])))
        joined = best[0] + best[1]
        if joined in known:
            del pairs[best]
            continue
        ranks.append(joined)
        known.add(joined)
        for i in sorted(where.pop(best)):
            old = parts[i]
            for pair in pairwise(old):
                pairs[pair] -= counts[i]
                where[pair].discard(i)
            parts[i] = _merge(old, joined)
            for pair in pairwise(parts[i]):
                pairs[pair] += counts[i]
                where[pair].add(i)
        pairs = +pairs
    return ranks


def _merge(word: Sequence[bytes], joined: bytes) -> list[bytes]:
    out: list[bytes] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and word[i] + word[i + 1] == joined:
            out.append(joined)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def dump_ranks(ranks: Iterable[bytes]) -> bytes:
    """``ranks`` as the text of a ``tiktoken.model``: one line "base64 rank" each."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))


def parse_ranks(model: bytes, file: str = "tiktoken.model") -> list[bytes]:
    """The byte strings of a ``tiktoken.model`` in rank order.

    Raises:
        InputError: a line is not "base64 rank", or the ranks are not 0, 1, 2 ...
    """
    ranks: list[bytes] = []
    for number, line in enumerate(model.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            value = base64.b64decode(token, validate=True)
            at = int(rank)
        except (ValueError, binascii.Error):
            raise InputError(f"{file}: line {number} is not 'base64 rank'") from None
        if at != len(ranks):
            raise InputError(f"{file}: line {number} has rank {at}, expected {len(ranks)}")
        ranks.append(value)
    return ranks


def encoding(model: bytes) -> tiktoken.Encoding:
    """The tokenizer of a ``tiktoken.model``; ``encode_ordinary`` never yields special tokens, and adds no BOS."""
    ranks = {token: rank for rank, token in enumerate(parse_ranks(model))}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
