"""Makes small GGUF models of kimi-k3 and kimi-k31 from a config alone, with random weights.

Weights come from raw 64-bit numbers of PCG64 by additions and one multiplication, so they are the same bits with
every numpy and on every processor: results stored for such a model stay valid. Used where a model of the right
architecture is needed but its words do not matter: runtime checks, workers, upstream's own build.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from convert.config import ModelConfig
from convert.domain import TensorSpec
from convert.gguf_file import MetadataEntry, TensorEntry, lay_out
from convert.metadata import architecture_keys
from convert.shapes import released_specs
from quant.encode import encode
from quant.errors import UsageError
from quant.tensors import F32Array, F32Rows, TensorClass
from quant.types import QuantType

ValueType = gguf.GGUFValueType

BYTE_TOKENS = 128
_NORMAL, _CONTROL = 1, 3
_NAMED = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
# Classes that keep float32 whatever the rest becomes: llama.cpp computes with them in float32.
_FLOAT_CLASSES = frozenset(
    {
        TensorClass.NORM,
        TensorClass.RESIDUAL_SCORE,
        TensorClass.KDA_CONV,
        TensorClass.KDA_STATE,
        TensorClass.ROUTER,
        TensorClass.ROUTER_BIAS,
        TensorClass.INDEXER_WEIGHTS,
    }
)
_GRAIN = 1 << 20


def make_gguf(
    path: Path,
    config: ModelConfig,
    *,
    seed: int,
    qtype: QuantType | Callable[[TensorSpec], QuantType] = QuantType.F32,
    keys: Mapping[str, MetadataEntry] | None = None,
) -> Path:
    """Write a model and return ``path``.

    Its vocabulary is ASCII in order, then control tokens up to ``config.vocab_size``; without merges, so that ASCII
    text becomes its byte values, and any token is valid text by itself.

    Args:
        config: all sizes; of a kimi-k31, MLA layers that ``dsa.layers`` leaves out share the selection before them.
        qtype: type of the matrices; norms, router, convolution and other small tensors are float32.
        keys: replace entries of the same key, or add to them.

    Raises:
        UsageError: a vocabulary below 134, or widths that ``qtype`` cannot hold.
    """
    if config.vocab_size < BYTE_TOKENS + len(_NAMED):
        raise UsageError(f"a vocabulary of {config.vocab_size} has no room for ASCII and the markers")
    choose = qtype if callable(qtype) else lambda spec: qtype
    specs = released_specs(config)
    types = [QuantType.F32 if spec.cls in _FLOAT_CLASSES else choose(spec) for spec in specs]
    entries = [TensorEntry(spec.name, spec.shape, kind) for spec, kind in zip(specs, types, strict=True)]
    layout = lay_out(model_keys(config, keys), entries)
    with path.open("wb") as file:
        file.write(layout.header)
        for spec, entry, offset in zip(specs, entries, layout.offsets, strict=True):
            file.seek(offset)
            file.write(encode(F32Rows(values(spec, seed)), entry.qtype, encoder="ggml").data)
        file.truncate(layout.nbytes)
    return path


def values(spec: TensorSpec, seed: int) -> F32Array:
    """Weights of a tensor, F32 [rows, columns]: of spread 1 / sqrt(columns) for a matrix, near 1 for a norm."""
    columns = spec.shape[-1]
    noise = _noise(f"{seed}/{spec.name}", math.prod(spec.shape)).reshape(-1, columns)
    match spec.cls:
        case TensorClass.NORM:
            return noise * np.float32(0.1) + np.float32(0 if spec.name.endswith(".bias") else 1)
        case TensorClass.KDA_STATE if spec.name.endswith("ssm_a"):
            # -exp(A_log) is negative.
            return noise * np.float32(0.2) - np.float32(1.5)
        case TensorClass.KDA_STATE | TensorClass.KDA_CONV:
            return noise * np.float32(0.5)
        case TensorClass.ROUTER_BIAS:
            return noise * np.float32(0.05)
        case _:
            return noise * np.float32(1 / math.sqrt(columns))


def byte_text(length: int, seed: int) -> str:
    """Printable ASCII text of ``length`` bytes, without structure; its token ids are its byte values."""
    raw = np.random.PCG64(seed).random_raw(length)
    return bytes((raw % 95 + 32).astype(np.uint8)).decode()


def _noise(name: str, count: int) -> F32Array:
    """Numbers of mean 0 and variance 1: sums of four 16-bit uniform numbers, exact in float32."""
    source = np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little"))
    result = np.empty(count, dtype=np.float32)
    for begin in range(0, count, _GRAIN):
        part = result[begin : begin + _GRAIN]
        words = source.random_raw(len(part)).astype("<u8").view("<u2").reshape(-1, 4)
        part[:] = words.sum(axis=1, dtype=np.uint32)
        part -= np.float32(2 * 65535)
        part *= np.float32(math.sqrt(3) / 65536)
    return result


def model_keys(config: ModelConfig, keys: Mapping[str, MetadataEntry] | None = None) -> list[MetadataEntry]:
    """The keys of ``make_gguf``; ``keys`` replace entries or add to them."""
    count = config.vocab_size
    named = [*_NAMED, *(f"<|reserved_token_{i}|>" for i in range(BYTE_TOKENS + len(_NAMED), count))]
    types = [_NORMAL] * BYTE_TOKENS + [_CONTROL] * (count - BYTE_TOKENS)
    entries = [
        _entry("general.architecture", ValueType.STRING, config.arch),
        _entry("general.type", ValueType.STRING, "model"),
        _entry("general.name", ValueType.STRING, "random weights"),
        *architecture_keys(config),
        _entry("tokenizer.ggml.model", ValueType.STRING, "gpt2"),
        _entry("tokenizer.ggml.pre", ValueType.STRING, "kimi-k2"),
        _array("tokenizer.ggml.tokens", ValueType.STRING, [*_byte_tokens(), *named]),
        _array("tokenizer.ggml.token_type", ValueType.INT32, types),
        _array("tokenizer.ggml.merges", ValueType.STRING, []),
        _entry("tokenizer.ggml.bos_token_id", ValueType.UINT32, BYTE_TOKENS),
        _entry("tokenizer.ggml.eos_token_id", ValueType.UINT32, BYTE_TOKENS + 2),
        _entry("tokenizer.ggml.add_bos_token", ValueType.BOOL, False),
    ]
    merged = {entry.key: entry for entry in entries} | dict(keys or {})
    return list(merged.values())


def _byte_tokens() -> list[str]:
    """ASCII as GPT-2's vocabularies write it: visible characters as they are, the others from U+0100 on."""
    hidden = [*range(0x21), 0x7F]
    return [chr(0x100 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(BYTE_TOKENS)]


def _entry(key: str, type_: Any, value: Any) -> MetadataEntry:
    return MetadataEntry(key, type_, value)


def _array(key: str, element: Any, items: list[Any]) -> MetadataEntry:
    return MetadataEntry(key, ValueType.ARRAY, items, element)
