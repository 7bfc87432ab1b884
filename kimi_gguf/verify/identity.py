"""Whether a GGUF and a checkpoint are the same model before a weight is looked at: sizes, vocabulary, tensor names."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from convert.config import ModelConfig
from convert.domain import SourceTensor, TensorSpec
from convert.transforms import row_count
from convert.vocab import Vocab
from kimi_gguf.verify.verdicts import TensorVerdict
from quant.gguf_cursor import StringArray
from quant.gguf_parser import GgufTensor, GgufValue

_NOT_IN_KEYS = frozenset({"bos", "eos", "pad", "tie_embeddings", "warnings"})
_ABSORBED = re.compile(r"\.attn_[kv]_b\.")
_NO_GROUPS = frozenset({"moe.groups", "moe.groups_used"})


def config_faults(source: ModelConfig, found: ModelConfig) -> Iterator[str]:
    """Sizes and constants that the checkpoint's config and the file's keys state differently."""
    pairs = zip(_flat(asdict(source)), _flat(asdict(found)), strict=False)
    for (name, mine), (other_name, theirs) in pairs:
        if name != other_name:
            yield f"the checkpoint is {source.arch}, the file is {found.arch}"
            return
        if name in _NOT_IN_KEYS or (name in _NO_GROUPS and {mine, theirs} <= {None, 1}):
            continue
        same = math.isclose(mine, theirs, rel_tol=1e-6) if isinstance(mine, float) and theirs else mine == theirs
        if not same:
            yield f"{name} is {_short(theirs)} in the file, {_short(mine)} in the checkpoint"


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def vocabulary_faults(vocab: Vocab, metadata: Mapping[str, GgufValue]) -> Iterator[str]:
    """Where the file's tokens, types, merges and special ids are not those of the checkpoint's tokenizer."""
    lists: dict[str, Sequence[Any]] = {"tokens": vocab.tokens, "token_type": vocab.types, "merges": vocab.merges}
    for key, expected in lists.items():
        found = metadata.get(f"tokenizer.ggml.{key}")
        if found is None or not isinstance(found.value, StringArray | np.ndarray):
            yield f"the key tokenizer.ggml.{key} is missing"
        elif len(found.value) != len(expected):
            yield f"tokenizer.ggml.{key} has {len(found.value)} entries, the checkpoint makes {len(expected)}"
        else:
            wrong = [i for i, (a, b) in enumerate(zip(found.value, expected, strict=True)) if a != b]
            if wrong:
                i = wrong[0]
                yield (
                    f"tokenizer.ggml.{key}: {len(wrong)} entries differ, first {i}:"
                    f" {found.value[i]!r} where the checkpoint makes {expected[i]!r}"
                )
    for key, number in (("bos", vocab.bos), ("eos", vocab.eos), ("padding", vocab.pad)):
        stated = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and stated is not None and stated.value != number:
            yield f"the {key} token is {stated.value}, {number} in the checkpoint"


@dataclass(frozen=True, slots=True)
class Matched:
    """Specs with their tensors, and verdicts on what has no counterpart or another shape."""

    pairs: tuple[tuple[TensorSpec, GgufTensor], ...]
    unpaired: tuple[TensorVerdict, ...]


def match_tensors(
    specs: Iterable[TensorSpec], sources: Mapping[str, SourceTensor], tensors: Iterable[GgufTensor]
) -> Matched:
    """Find the tensor of each spec.

    llama.cpp also takes ``attn_k_b`` and ``attn_v_b`` as the one matrix that they come from; so does this.
    """
    found = {tensor.name: tensor for tensor in tensors}
    names = frozenset(found)
    pairs: list[tuple[TensorSpec, GgufTensor]] = []
    unpaired = []
    for spec in specs:
        fused = _fused(spec, sources, names)
        if fused is not None:
            if spec.transform == "head_keys":
                spec = fused
            else:
                continue
        tensor = found.pop(spec.name, None)
        if tensor is None:
            unpaired.append(_unpaired(spec.name, spec.cls, spec.source_type, "", "is missing", row_count(spec)))
        elif _squeezed(tensor.shape) != _squeezed(spec.shape) or tensor.shape[-1] != spec.shape[-1]:
            fault = f"has shape {list(tensor.shape)}, the checkpoint makes {list(spec.shape)}"
            unpaired.append(_unpaired(spec.name, spec.cls, spec.source_type, tensor.qtype.name, fault, row_count(spec)))
        else:
            pairs.append((spec, tensor))
    for tensor in found.values():
        rows = math.prod(tensor.shape[:-1])
        fault = "nothing in the checkpoint makes this tensor"
        unpaired.append(_unpaired(tensor.name, "", "", tensor.qtype.name, fault, rows))
    return Matched(tuple(pairs), tuple(unpaired))


def _fused(spec: TensorSpec, sources: Mapping[str, SourceTensor], names: Container[str]) -> TensorSpec | None:
    """The spec of the undivided matrix, where the file holds that instead of ``spec``."""
    name = _ABSORBED.sub(".attn_kv_b.", spec.name)
    if spec.name in names or name == spec.name or name not in names:
        return None
    return replace(spec, name=name, shape=sources[spec.sources[0]].shape, transform="copy")


def _unpaired(name: str, cls: str, source_type: str, qtype: str, fault: str, rows: int) -> TensorVerdict:
    return TensorVerdict(name, cls, source_type, qtype, "none", "", rows, 0, 0, None, None, (fault,))


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)
