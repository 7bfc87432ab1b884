"""Whether a GGUF is a whole kimi-k3 or kimi-k31: its keys, tensors, shapes and offsets against the architecture's list.

The list is the one that writes files: a config is read back from the keys, and the keys and tensors that this config
makes are compared with those that are there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.config import Arch, ModelConfig
from convert.gguf_config import KeyReader, kind_of
from convert.metadata import architecture_keys
from convert.shapes import released_specs
from quant.gguf_cursor import StringArray
from quant.gguf_parser import GgufHeader, GgufTensor, GgufValue, ValueType
from quant.gguf_split import GgufSet
from quant.recipe_floors import FLOORS, below
from quant.tensors import TensorClass

# What llama.cpp's graph multiplies in F32 alone; of the other floors a file may fall short and still load.
_F32_ONLY = frozenset(
    {
        TensorClass.NORM,
        TensorClass.RESIDUAL_SCORE,
        TensorClass.KDA_CONV,
        TensorClass.KDA_STATE,
        TensorClass.ROUTER_BIAS,
    }
)
_ARCHITECTURES: dict[str, Arch] = {"kimi-k3": "kimi-k3", "kimi-k31": "kimi-k31"}
_SHOWN = 6
# llama.cpp also takes the two absorbed matrices as the one that they come from.
_FUSED = re.compile(r"(.+)\.attn_[kv]_b\.weight")
# Absent, llama.cpp takes a value that this model does not have, and says nothing.
_SILENT = {
    "kda.gate_lower_bound": "the decay gate becomes a softplus",
    "expert_weights_scale": "routing weights lose their scale",
    "expert_weights_norm": "routing weights are not normalised",
}
_OPTIONAL = frozenset(
    {
        "vocab_size",
        "attention.value_length",
        "attention.indexer.types",
        "attention.layer_norm_epsilon",
        "expert_group_count",
        "expert_group_used_count",
    }
)
# Of the indexer flags only those of MLA layers count, and the LayerNorm epsilon follows from no other key.
_FREE = frozenset({"attention.indexer.types", "attention.layer_norm_epsilon"})


@dataclass(frozen=True, slots=True)
class Structure:
    """The result of a check: ``faults`` that make a file unusable or wrong, ``warnings`` about the rest."""

    config: ModelConfig | None
    faults: tuple[str, ...]
    warnings: tuple[str, ...]


def check_structure(files: GgufSet) -> Structure | None:
    """Compare a file or set with its architecture; None when it is not a kimi-k3 or kimi-k31 model."""
    arch = _ARCHITECTURES.get(files.headers[0].get_str("general.architecture") or "")
    return None if arch is None else _Check(arch, files).run()


@dataclass
class _Check:
    arch: Arch
    files: GgufSet
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self) -> Structure:
        for header in self.files.headers:
            self.faults += layout_faults(header)
        tensors = {tensor.name: tensor for tensor in self.files.tensors}
        config = self._config(tensors)
        if config is not None:
            self._check_keys(config)
            self._check_tensors(config, tensors)
            self._check_tokenizer(config)
        return Structure(config, tuple(self.faults), tuple(self.warnings))

    def _config(self, tensors: Mapping[str, GgufTensor]) -> ModelConfig | None:
        keys = KeyReader(self.arch, self.files.metadata, len(tensors))
        config = keys.config(latent_norm=any(name.endswith(".ffn_routed_norm.weight") for name in tensors))
        self.faults += keys.faults
        return config

    def _check_keys(self, config: ModelConfig) -> None:
        expected = {entry.key: entry for entry in architecture_keys(config)}
        prefix = f"{self.arch}."
        for key, entry in expected.items():
            found = self.files.metadata.get(key)
            bare = key.removeprefix(prefix)
            if found is None:
                if bare in _SILENT:
                    self.faults.append(f"the key {key} is missing: {_SILENT[bare]}")
                elif bare not in _OPTIONAL:
                    self.faults.append(f"the key {key} is missing")
                continue
            if (found.type, found.element) != (entry.type, entry.element) and not _both_integers(found, entry):
                self.faults.append(f"the key {key} is {kind_of(found)}, llama.cpp expects {kind_of(entry)}")
            elif bare not in _FREE and not _same(found.value, entry.value):
                found_text, expected_text = _short(found.value), _short(entry.value)
                self.faults.append(f"the key {key} is {found_text}, the other keys make it {expected_text}")
        if config.kda.gate_lower_bound is None:
            self.warnings.append(f"the key {prefix}kda.gate_lower_bound is missing: {_SILENT['kda.gate_lower_bound']}")
        known = expected.keys() | {prefix + bare for bare in _OPTIONAL}
        extra = [key for key in self.files.metadata if key.startswith(prefix) and key not in known]
        if extra:
            self.warnings.append(f"keys that {self.arch} does not know: {_listed(extra)}")

    def _check_tensors(self, config: ModelConfig, tensors: Mapping[str, GgufTensor]) -> None:
        missing, misshapen = [], []
        low: dict[tuple[TensorClass, str], list[str]] = {}
        known = set()
        for spec in released_specs(config):
            known.add(spec.name)
            fused = _FUSED.sub(r"\1.attn_kv_b.weight", spec.name)
            if fused in tensors and spec.name not in tensors:
                known.add(fused)
                continue
            found = tensors.get(spec.name)
            if found is None:
                missing.append(spec.name)
            elif _squeezed(found.shape) != _squeezed(spec.shape):
                misshapen.append(f"{spec.name} is {list(found.shape)}, the keys make it {list(spec.shape)}")
            elif below(found.qtype, FLOORS.get(spec.cls)):
                low.setdefault((spec.cls, found.qtype.name), []).append(spec.name)
        extra = [name for name in tensors if name not in known]
        if missing:
            self.faults.append(f"{len(missing)} tensors are missing: {_listed(missing)}")
        if misshapen:
            self.faults.append(f"{len(misshapen)} tensors have another shape: {_listed(misshapen)}")
        if extra:
            self.faults.append(f"{len(extra)} tensors have no place in {self.arch}: {_listed(extra)}")
        for (cls, qtype), names in low.items():
            where = self.faults if cls in _F32_ONLY else self.warnings
            where.append(f"{len(names)} tensors ({cls}) are {qtype}, below {FLOORS[cls].name}: {_listed(names)}")

    def _check_tokenizer(self, config: ModelConfig) -> None:
        metadata = self.files.metadata
        tokens = metadata.get("tokenizer.ggml.tokens")
        if tokens is None or not isinstance(tokens.value, StringArray):
            self.faults.append("the key tokenizer.ggml.tokens is missing")
            return
        count = len(tokens.value)
        if count != config.vocab_size:
            self.faults.append(f"{count} tokens for {config.vocab_size} rows of the embedding")
        types = metadata.get("tokenizer.ggml.token_type")
        if types is not None and isinstance(types.value, np.ndarray) and len(types.value) != count:
            self.faults.append(f"{len(types.value)} token types for {count} tokens")
        for key in ("bos", "eos", "padding"):
            number = self.files.headers[0].get_int(f"tokenizer.ggml.{key}_token_id")
            if number is None and key == "eos":
                self.warnings.append("the key tokenizer.ggml.eos_token_id is missing")
            elif number is not None and not 0 <= number < count:
                self.faults.append(f"the {key} token is {number}, but there are {count} tokens")
        if "tokenizer.chat_template" not in metadata:
            self.warnings.append("no chat template")


def layout_faults(header: GgufHeader) -> list[str]:
    """Where tensor data is not laid out as llama.cpp insists: back to back, each padded, up to the end of the file."""
    faults = []
    expected = header.data_offset
    for tensor in header.tensors:
        if tensor.offset != expected:
            faults.append(f"{header.file}: {tensor.name} starts at {tensor.offset}, llama.cpp expects {expected}")
            break
        expected = header.data_offset + _padded(tensor.offset - header.data_offset + tensor.nbytes, header.alignment)
    else:
        if header.tensors and header.file_size not in (expected, header.tensors[-1].offset + header.tensors[-1].nbytes):
            faults.append(f"{header.file}: {header.file_size} bytes, but its tensors end at {expected}")
    return faults


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without axes of 1: llama.cpp takes convolutions with three axes or four."""
    return tuple(extent for extent in shape if extent != 1)


def _both_integers(found: GgufValue, entry: Any) -> bool:
    """llama.cpp reads arrays of layer flags as bool, int or unsigned alike."""
    kinds = {ValueType.BOOL, ValueType.INT32, ValueType.UINT32}
    return found.element in kinds and entry.element in kinds


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, np.ndarray):
        return [int(x) for x in found.tolist()] == [int(x) for x in expected]
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-6)
    return bool(found == expected)


def _short(value: Any) -> str:
    text = str(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
