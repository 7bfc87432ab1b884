"""What llama.cpp's converter needs around it to convert a synthetic checkpoint, for ``bench_convert.py``.

The model's own tokenizer code, which a synthetic checkpoint lacks, is a stand-in that hands over ranks and special
tokens; so is ``transformers`` where it is not installed.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import types
from functools import cache
from pathlib import Path


def prepare() -> None:
    """Make ``transformers`` importable, before the converter is imported."""
    if importlib.util.find_spec("transformers") is None:
        sys.modules["transformers"] = transformers_stand_in()


def equip() -> None:
    """Give the converter, once imported, a tokenizer for the checkpoint."""
    from conversion.kimi_k3 import KimiK3Model

    sys.modules["transformers"].AutoTokenizer = Tokenizer  # type: ignore[attr-defined]
    # It knows vocabularies by a hash of what they make of a text; this one is not the model's.
    KimiK3Model.get_vocab_base_pre = lambda *_: "kimi-k2"


def transformers_stand_in() -> types.ModuleType:
    """What the converter asks of ``transformers``, but for the tokenizer's own code."""

    class AutoConfig:
        @staticmethod
        def from_pretrained(*_: object, **__: object) -> None:
            raise OSError("not installed: config.json is read instead")

    module = types.ModuleType("transformers")
    module.AutoConfig = AutoConfig  # type: ignore[attr-defined]
    slow = types.ModuleType("transformers.convert_slow_tokenizer")
    slow.bytes_to_unicode = bytes_to_unicode  # type: ignore[attr-defined]
    sys.modules[slow.__name__] = slow
    return module


@cache
def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-ins of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class Tokenizer:
    """What the converter asks of the model's tokenizer: ranks, special tokens, and the id of the end."""

    def __init__(self, checkpoint: Path) -> None:
        lines = (checkpoint / "tiktoken.model").read_bytes().splitlines()
        pairs = (line.split() for line in lines if line)
        self._mergeable_ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        config = json.loads((checkpoint / "tokenizer_config.json").read_text())
        named = {int(key): str(token["content"]) for key, token in config.get("added_tokens_decoder", {}).items()}
        first = len(self._mergeable_ranks)
        slots = range(first, first + 256)
        self.special_tokens = {named.get(slot, f"<|reserved_token_{slot}|>"): slot for slot in slots}
        self.eos_id = first + 1
        self.model = self

    @staticmethod
    def from_pretrained(directory: str | Path, **_: object) -> Tokenizer:
        return Tokenizer(Path(directory))
