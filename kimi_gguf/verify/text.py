"""Text to token ids, with the vocabulary of a checkpoint or of a GGUF; both give the same ids.

Ordinary text never becomes special tokens, and no BOS is put in front: Kimi's own tokenizer adds none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from convert.domain import Source
from convert.vocab import RANKS_FILE, byte_text, parse_ranks
from kimi_gguf.reference.tokenizer import PATTERN
from kimi_gguf.verify.observations import TokenSet
from quant.errors import InputError, UsageError
from quant.gguf_cursor import StringArray
from quant.gguf_split import read_gguf_set

MAX_TEXT_BYTES = 1 << 28
"""Some 60 million tokens; more would take gigabytes before a run begins."""
_NORMAL = 1
_AGAIN = "convert the checkpoint again"
_BYTE_OF = {byte_text(bytes([byte])): byte for byte in range(256)}

# Kimi's tokenizer cuts what is longer before it merges, and cuts decide ids.
_PIECE_CHARACTERS = 400_000
_RUN_CHARACTERS = 25_000
_RUN = re.compile(rf"\s{{1,{_RUN_CHARACTERS}}}|\S{{1,{_RUN_CHARACTERS}}}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The byte strings of a vocabulary in rank order, and which vocabulary it is."""

    ranks: Sequence[bytes]
    digest: str

    def encode(self, text: str, count: int | None = None) -> list[int]:
        """Token ids of ``text``, all of them or at least the first ``count``."""
        mergeable = {token: rank for rank, token in enumerate(self.ranks)}
        encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=mergeable, special_tokens={})
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(encoding.encode_ordinary(piece))
            if count is not None and len(ids) >= count:
                break
        return ids


def _pieces(text: str) -> Iterator[str]:
    for begin in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[begin : begin + _PIECE_CHARACTERS]
        runs = [match[0] for match in _RUN.finditer(piece)]
        start, length = 0, 0
        kept: list[str] = []
        for i, run in enumerate(runs):
            # Only a run that reached the limit and goes on in kind is cut; everything else stays in one piece.
            length += len(run)
            goes_on = i + 1 < len(runs) and runs[i + 1][0].isspace() == run[0].isspace()
            if goes_on:
                kept.append(piece[start : start + length])
                start, length = start + length, 0
        yield from kept
        yield piece[start:]


def _vocabulary(ranks: Sequence[bytes]) -> Vocabulary:
    digest = hashlib.sha256()
    for token in ranks:
        digest.update(len(token).to_bytes(4, "little") + token)
    return Vocabulary(ranks, digest.hexdigest())


def checkpoint_vocabulary(source: Source) -> Vocabulary:
    """The vocabulary of a checkpoint's ``tiktoken.model``.

    Raises:
        InputError: there is none, or it is damaged.
    """
    model = source.read_file(RANKS_FILE)
    if model is None:
        raise InputError(f"{source.label}: no {RANKS_FILE}", "copy the checkpoint's small files too")
    return _vocabulary(parse_ranks(model))


def gguf_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary that a GGUF holds: its ordinary tokens are the ranks, in order.

    Raises:
        InputError: no byte-pair vocabulary of Kimi's kind.
    """
    metadata = read_gguf_set(path).metadata
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    pre = metadata.get("tokenizer.ggml.pre")
    if tokens is None or types is None or pre is None or pre.value != "kimi-k2":
        raise InputError(f"{path}: no vocabulary of pre-tokenizer kimi-k2", "convert the checkpoint with its tokenizer")
    if not isinstance(tokens.value, StringArray) or not isinstance(types.value, np.ndarray):
        raise InputError(f"{path}: tokenizer.ggml.tokens and token_type are no arrays", _AGAIN)
    kinds = types.value.tolist()
    ranks: list[bytes] = []
    for token, kind in zip(tokens.value, kinds, strict=False):
        if kind != _NORMAL:
            break
        try:
            ranks.append(bytes(_BYTE_OF[character] for character in token))
        except KeyError:
            raise InputError(
                f"{path}: token {len(ranks)} {token!r} is not spelled in byte characters", _AGAIN
            ) from None
    if not set(range(256)) <= {token[0] for token in ranks if len(token) == 1}:
        raise InputError(f"{path}: the vocabulary lacks some of the 256 single bytes", _AGAIN)
    if len(set(ranks)) != len(ranks):
        raise InputError(f"{path}: the vocabulary holds a token twice", _AGAIN)
    return _vocabulary(ranks)


def read_tokens(
    text: Path, vocabulary: Vocabulary, vocab_size: int, *, context: int, tokens: int | None = None
) -> TokenSet:
    """The first ``tokens`` tokens of a UTF-8 text, in chunks of ``context``; all of them when None.

    Raises:
        UsageError: no such text, or fewer than two tokens.
        InputError: not UTF-8.
    """
    if context < 2:
        raise UsageError(f"--context {context} is too short: a chunk needs at least 2 tokens", "512 is usual")
    if tokens is not None and tokens < 2:
        raise UsageError(f"--tokens {tokens} is too few: at least 2 are needed", "leave it out for the whole text")
    try:
        with text.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise UsageError(f"{text}: over {MAX_TEXT_BYTES:,} bytes of text", "give the part of it that is to be run")
        ids = vocabulary.encode(data.decode(), tokens)
    except OSError as error:
        raise UsageError(f"cannot read the text {text}: {error.strerror}", "name a text with --text FILE") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{text}: byte {error.start} is not UTF-8", "give a plain text in UTF-8") from None
    if len(ids) < 2:
        raise UsageError(f"{text}: {len(ids)} tokens; at least 2 are needed", "give a longer text")
    return TokenSet(
        ids=np.array(ids[:tokens], dtype=np.int32),
        context=context,
        vocab_size=vocab_size,
        text_name=text.name,
        text_sha256=hashlib.sha256(data).hexdigest(),
        vocab_sha256=vocabulary.digest,
    )
