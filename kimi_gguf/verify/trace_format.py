"""The bytes of a ``.kgtrace``: what a comparison needs of a baseline, in about 4 KB per token of the released model.

::

    "KGTRACE1", u32 n, n bytes of JSON, zeros up to a multiple of 64
    for each MoE layer:  one record per token:
        expert ids, heaviest first, each in as few bits as the number of experts needs, packed little endian
        f16 largest weight, then per expert u8 its weight as a share of that, in 255ths
    one record per token:
        f32 log-probability of the true next token, f32 probability of all tokens but the top K,
        K x u24 token ids, likeliest first, then S x u24 ids drawn from the others by their probability,
        K + S x f16 their log-probabilities
    SHA-256 of all before

At 92 layers of 16 of 896 experts, K = 96 and S = 20 a token takes 92 x 38 + 588 = 4,084 bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kimi_gguf.verify.observations import EngineName, F32Array, I32Array, ModelIdentity, TopLogProbs
from quant.errors import InputError

Bytes = npt.NDArray[np.uint8]
F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]

MAGIC: Final = b"KGTRACE1"
DEFAULT_TOP: Final = 96
SAMPLES: Final = 20
MAX_TOP: Final = 4096
DIGEST_BYTES: Final = 32
MAX_HEADER_BYTES: Final = 1 << 20
_ALIGNMENT: Final = 64
_MOST = {"layers": 4096, "experts": 1 << 16, "used": 256, "top": MAX_TOP, "vocab_size": 1 << 24, "tokens": 1 << 32}
_VERSION = 1
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace is about.

    Attributes:
        engine, preset: what ran the model, and by which conventions.
        model: which model.
        tokens, context, vocab_size: of the token set, and hashes of it (``digest``), its text and vocabulary.
        top: K, tokens kept per position.
    """

    engine: EngineName
    preset: str
    model: ModelIdentity
    tokens: int
    context: int
    vocab_size: int
    digest: str
    text_name: str
    text_sha256: str
    vocab_sha256: str
    top: int

    @property
    def id_bits(self) -> int:
        """Bits of one expert id."""
        return max(1, (self.model.experts - 1).bit_length())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one token in one layer."""
        used = self.model.used
        return -(-self.id_bits * used // 8) + 2 + used

    @property
    def output_bytes(self) -> int:
        """Bytes of one token's output."""
        return 8 + 5 * (self.top + SAMPLES)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all."""
        return len(self.model.moe_layers) * self.expert_bytes + self.output_bytes

    def packed(self) -> bytes:
        """The file's first bytes, up to its records."""
        text = json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True).encode()
        head = MAGIC + struct.pack("<I", len(text)) + text
        return head.ljust(-(-len(head) // _ALIGNMENT) * _ALIGNMENT, b"\0")


def parse_header(data: bytes, file: str) -> tuple[TraceHeader, int]:
    """The header at the start of ``data``, and the offset of the first record.

    Args:
        data: up to ``MAX_HEADER_BYTES`` and a little more from the start of the file.

    Raises:
        InputError: not a trace, cut short, or fields that cannot be.
    """
    begin = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise InputError(f"{file} is not a trace", "make one with: kimi-gguf eval record BASE --text FILE -o FILE")
    (size,) = struct.unpack_from("<I", data, len(MAGIC))
    if size > MAX_HEADER_BYTES or begin + size > len(data):
        raise InputError(f"{file}: a header of {size} bytes in a file of {len(data)}", "the trace is cut short")
    try:
        values = json.loads(data[begin : begin + size])
        if values.pop("version") != _VERSION:
            raise InputError(f"{file}: a trace of another version", "record it again")
        header = _checked(values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: the header cannot be read: {error}", "record the trace again") from None
    return header, -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT


def _checked(values: dict[str, Any]) -> TraceHeader:
    model = values.pop("model")
    sizes = {"layers": model["layers"], "experts": model["experts"], "used": model["used"]}
    sizes |= {name: values[name] for name in ("top", "vocab_size", "tokens")}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= _MOST[name]:
            raise ValueError(f"{name} is {value!r}")
    if type(values["context"]) is not int or values["context"] < 2:
        raise ValueError(f"context is {values['context']!r}")
    if sizes["used"] > sizes["experts"] or sizes["top"] > sizes["vocab_size"]:
        raise ValueError("more is kept than there is")
    moe_layers = tuple(model.pop("moe_layers"))
    if any(type(i) is not int or not 0 <= i < sizes["layers"] for i in moe_layers) or len(set(moe_layers)) != len(
        moe_layers
    ):
        raise ValueError("moe_layers name layers that are not there")
    kinds = tuple(model.pop("layer_kinds"))
    if len(kinds) != sizes["layers"] or not set(kinds) <= {"kda", "mla"}:
        raise ValueError("layer_kinds do not fit the layers")
    texts = [values[name] for name in ("engine", "preset", "digest", "text_name", "text_sha256", "vocab_sha256")]
    texts += [model[name] for name in ("label", "arch", "digest")]
    if any(type(text) is not str or len(text) > 4096 for text in texts):
        raise ValueError("a name is no text")
    return TraceHeader(model=ModelIdentity(moe_layers=moe_layers, layer_kinds=kinds, **model), **values)


def pack_experts(header: TraceHeader, ids: I32Array, weights: F32Array) -> Bytes:
    """Records U8 [n, expert_bytes] of expert ids I32 [n, used] and weights F32 [n, used]."""
    order = np.argsort(-weights, axis=1, kind="stable")
    ids, weights = np.take_along_axis(ids, order, axis=1), np.take_along_axis(weights, order, axis=1)
    bits = (ids[:, :, None] >> np.arange(header.id_bits)) & 1
    packed = np.packbits(bits.reshape(len(ids), -1).astype(np.uint8), axis=1, bitorder="little")
    largest = weights[:, :1].astype("<f2")
    divisor = largest.astype(np.float32)
    shares = weights / np.where(divisor > 0, divisor, 1.0)
    levels = np.clip(np.rint(shares * 255), 0, 255).astype(np.uint8)
    return np.concatenate((packed, largest.view(np.uint8), levels), axis=1)


def unpack_experts(header: TraceHeader, records: Bytes) -> tuple[I32Array, F32Array]:
    """The inverse of ``pack_experts``, heaviest first; weights are within 1/510 of the largest.

    Raises:
        ValueError: an id that no expert has, an expert twice, or a weight that is no number.
    """
    used, bits = header.model.used, header.id_bits
    width = -(-bits * used // 8)
    unpacked = np.unpackbits(records[:, :width], axis=1, count=bits * used, bitorder="little")
    ids = (unpacked.reshape(-1, used, bits).astype(np.int32) << np.arange(bits, dtype=np.int32)).sum(axis=2)
    ordered = np.sort(ids, axis=1)
    if (ids >= header.model.experts).any() or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError("expert ids that cannot be")
    largest = np.ascontiguousarray(records[:, width : width + 2]).view("<f2").astype(np.float32)
    if not np.isfinite(largest).all() or (largest < 0).any():
        raise ValueError("router weights that cannot be")
    shares = records[:, width + 2 :].astype(np.float32) / np.float32(255)
    return ids.astype(np.int32), largest * shares


def pack_output(header: TraceHeader, log_probs: F64Array, targets: I32Array, first: int) -> Bytes:
    """Records U8 [n, output_bytes] of log-probabilities F64 [n, V] and true next tokens I32 [n].

    Args:
        first: index of the first token in the whole text; what is drawn depends on it and on nothing else.
    """
    rows = np.arange(len(targets))[:, None]
    best = _best(log_probs, header.top)
    kept = log_probs[rows, best]
    others = np.exp(log_probs)
    others[rows, best] = 0.0
    drawn = _draw(others, best[:, 0], first)
    # Rounding may leave a certain token a hair above probability 1.
    true = np.minimum(log_probs[rows[:, 0], targets], 0.0)
    scalars = np.stack((true, np.minimum(others.sum(axis=1), 1.0)), axis=1).astype("<f4")
    ids = np.concatenate((best, drawn), axis=1)
    thirds = np.ascontiguousarray(ids.astype("<u4")).view(np.uint8).reshape(*ids.shape, 4)[:, :, :3]
    halves = np.clip(np.concatenate((kept, log_probs[rows, drawn]), axis=1), -65000, 0.0).astype("<f2")
    return np.concatenate((scalars.view(np.uint8), thirds.reshape(len(ids), -1), halves.view(np.uint8)), axis=1)


def _best(log_probs: F64Array, top: int) -> I64Array:
    """The ``top`` likeliest tokens of each row, likeliest first, equal ones by id."""
    rows, vocab = log_probs.shape
    if top < vocab:
        best = np.sort(np.argpartition(-log_probs, top - 1, axis=1)[:, :top], axis=1)
    else:
        best = np.tile(np.arange(vocab), (rows, 1))
    order = np.argsort(-np.take_along_axis(log_probs, best, axis=1), axis=1, kind="stable")
    ordered: I64Array = np.take_along_axis(best, order, axis=1)
    return ordered


def _draw(probabilities: F64Array, otherwise: I64Array, first: int) -> I64Array:
    """``SAMPLES`` tokens of each row in equal steps of the cumulated probability; ``otherwise`` where it is zero.

    The first step of each row follows a golden-ratio sequence, so that over many tokens all offsets come up equally.
    """
    totals = np.cumsum(probabilities, axis=1)
    offsets = np.modf((first + np.arange(len(totals)) + 0.5) * _GOLDEN)[0]
    drawn = np.empty((len(totals), SAMPLES), dtype=np.int64)
    for i, (total, offset) in enumerate(zip(totals, offsets, strict=True)):
        at = (np.arange(SAMPLES) + offset) / SAMPLES * total[-1]
        # The first token whose cumulated probability exceeds the mark has a probability above 0 itself.
        drawn[i] = np.searchsorted(total, at, side="right") if total[-1] > 0 else otherwise[i]
    inside: I64Array = np.minimum(drawn, probabilities.shape[1] - 1)
    return inside


def unpack_output(header: TraceHeader, records: Bytes) -> TopLogProbs:
    """The inverse of ``pack_output``.

    Raises:
        ValueError: a token that the vocabulary has not, or something that is no probability.
    """
    top, n, kept = header.top, len(records), header.top + SAMPLES
    scalars = np.ascontiguousarray(records[:, :8]).view("<f4").astype(np.float32)
    wide = np.zeros((n, kept, 4), dtype=np.uint8)
    wide[:, :, :3] = records[:, 8 : 8 + 3 * kept].reshape(n, kept, 3)
    ids = wide.view("<u4")[:, :, 0].astype(np.int32)
    log_probs = np.ascontiguousarray(records[:, 8 + 3 * kept :]).view("<f2").astype(np.float32)
    target, tail = scalars[:, 0], scalars[:, 1]
    if (ids >= header.vocab_size).any():
        raise ValueError("token ids that cannot be")
    # Written so that NaN and minus infinity fail too.
    if not ((log_probs <= 0) & (log_probs > -np.inf)).all() or not ((target <= 0) & (target > -np.inf)).all():
        raise ValueError("log-probabilities that cannot be")
    if not ((tail >= 0) & (tail <= 1)).all():
        raise ValueError("probabilities that cannot be")
    return TopLogProbs(ids[:, :top], log_probs[:, :top], tail, target, ids[:, top:], log_probs[:, top:])
