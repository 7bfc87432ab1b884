"""Small files of a synthetic checkpoint: a valid tiktoken vocabulary of any size, tokenizer and generation configs."""

from __future__ import annotations

import base64
from collections import Counter
from functools import lru_cache
from itertools import chain, pairwise, product
from typing import Any

from kimi_gguf.reference.checkpoint_shape import SPECIAL_SLOTS, TinyShape, special_ids
from quant.errors import UsageError

# Named special slots by their distance from the first one, as released.
_NAMED_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
_NOT_SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")
_SAMPLE = """
 the quick brown fox jumps over the lazy dog and then the other dogs jump over the fox while it isn't looking
 we're sure that they've never seen what I'd call a proper sentence but that's how it is and they'll say it's fine
 The weights of the model are read once and written once in the order of the plan that the program made of them
 def main ( ) : return sum ( x for x in range ( 10 ) ) 1234 5678 90 == != -> += {} [] "text"
 月之暗面 的 模型 权重 会 被 转换 成 一个 文件 然后 被 读取 中文 文本 测试 我们 他们 模型 文件 中文
"""


def _merged(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    out: list[bytes] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


@lru_cache(maxsize=1)
def _trained() -> tuple[bytes, ...]:
    """The 256 bytes, then byte pairs merged over the sample text until no pair occurs twice."""
    words = Counter(tuple(bytes([b]) for b in f" {word}".encode()) for word in _SAMPLE.split())
    ranks = [bytes([b]) for b in range(256)]
    while True:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda p: (pairs[p], p))
        if pairs[best] < 2:
            return tuple(ranks)
        ranks.append(best[0] + best[1])
        words = Counter({_merged(word, best): count for word, count in words.items()})


def tiktoken_ranks(count: int) -> list[bytes]:
    """``count`` byte strings in rank order that form a valid BPE vocabulary.

    After the trained merges come all strings of two bytes, then of three: each is one merge of what precedes it.

    Raises:
        UsageError: fewer than the 256 bytes.
    """
    if count < 256:
        raise UsageError(f"a vocabulary needs at least 256 ranks and {SPECIAL_SLOTS} special slots, got {count} ranks")
    filler = chain(product(range(256), repeat=2), product(range(256), repeat=3))
    ranks = dict.fromkeys(_trained()[:count])
    while len(ranks) < count:
        ranks.setdefault(bytes(next(filler)))
    return list(ranks)


def tiktoken_model(count: int) -> bytes:
    """``tiktoken.model`` with ``count`` ranks: lines of "base64 rank"."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tiktoken_ranks(count)))


def tokenizer_config(shape: TinyShape) -> dict[str, Any]:
    """``tokenizer_config.json`` that names the special slots by absolute id; its eos is ``[EOS]``, as released."""
    decoder = {
        str(shape.ranks + slot): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _NOT_SPECIAL,
        }
        for slot, name in _NAMED_SLOTS.items()
    }
    return {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": shape.context,
    }


def generation_config(shape: TinyShape) -> dict[str, Any]:
    """``generation_config.json``: nothing but the length and the eos id, as released."""
    return {"max_length": shape.context, "eos_token_id": special_ids(shape)["eos_token_id"]}
