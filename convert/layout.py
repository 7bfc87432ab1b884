"""Which GGUF tensors a checkpoint becomes: the tables of ``tensor_table`` matched with the tensors that are there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from convert.config import ModelConfig
from convert.domain import Shard, SourceTensor, TensorSpec
from convert.tensor_table import GLOBAL_TABLE, LAYER_TABLE, TableRow, dimensions, layer_traits, shapes
from quant.errors import InputError

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
_MTP = re.compile(r"(?:model\.)?mtp")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LEAVES = frozenset({"weight", "bias", "weight_packed", "weight_scale", "A_log", "dt_bias", "e_score_correction_bias"})
_QUANTIZATION_WORDS = ("scale", "zero", "qweight", "packed", "weight_", "absmax", "g_idx")
_PLAIN_DTYPES = frozenset({"BF16", "F32"})
_SCALE_DTYPES = frozenset({"U8", "F8_E8M0"})
_CODES_PER_BYTE = 2
_CODES_PER_SCALE = 32
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The GGUF tensors of a checkpoint, in file order.

    Attributes:
        specs: blk.0 .. blk.N, each layer in the order of its table, then the global tensors.
        left_out: tensors that the text model has no place for: vision, multi-token prediction, layers past the last.
        warnings: sentences for the user.
    """

    specs: tuple[TensorSpec, ...]
    left_out: tuple[SourceTensor, ...]
    warnings: tuple[str, ...]


def build_layout(config: ModelConfig, tensors: Mapping[str, SourceTensor], shards: Sequence[Shard] = ()) -> Layout:
    """Match every tensor of a checkpoint with its place in a GGUF file.

    Args:
        config: sizes and layer kinds.
        tensors: the checkpoint's tensors by name, with or without the ``language_model.`` prefix.
        shards: names of the files that hold them, for messages.

    Raises:
        InputError: a tensor that is missing, that has another shape or dtype than the config says, that is quantized
            in an unknown way, or that nothing consumes.
    """
    return _Matcher(config, tensors, shards).layout()


class _Matcher:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, SourceTensor], shards: Sequence[Shard]) -> None:
        self.config = config
        self.tensors = tensors
        self.shards = shards
        self.sizes = dimensions(config)
        self.prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in tensors) else ""
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.zeros: list[str] = []
        self.warnings: list[str] = []

    def layout(self) -> Layout:
        self._check_leaves()
        specs = []
        for layer in range(self.config.n_layers):
            traits = layer_traits(self.config, layer)
            specs += self._specs(LAYER_TABLE, traits, layer)
        specs += self._specs(GLOBAL_TABLE, self._global_traits(), None)
        self._check_missing()
        left_out = self._left_out()
        if self.zeros:
            self.warnings.append(f"the checkpoint lacks {_listed(self.zeros)}: zeros are written, the same as no bias")
        return Layout(tuple(specs), left_out, tuple(self.warnings))

    def _global_traits(self) -> frozenset[str]:
        tied = self.config.tie_embeddings and not any(
            f"{self.prefix}lm_head.{leaf}" in self.tensors for leaf in ("weight", "weight_packed")
        )
        return frozenset({"all", "tied" if tied else "untied"})

    def _specs(self, table: Iterable[TableRow], traits: frozenset[str], layer: int | None) -> list[TensorSpec]:
        specs = [self._spec(row, layer) for row in table if row.trait in traits]
        return [spec for spec in specs if spec is not None]

    def _spec(self, row: TableRow, layer: int | None) -> TensorSpec | None:
        """The spec of ``row``; None after noting that a source of it is missing."""
        source_prefix = self.prefix if layer is None else f"{self.prefix}model.layers.{layer}."
        name = row.name if layer is None else f"blk.{layer}.{row.name}"
        shape = shapes(row.shape, self.sizes)[0]
        sources = tuple(source_prefix + source for source, _ in row.sources)
        expected = tuple(shapes(symbols, self.sizes) for _, symbols in row.sources)
        if row.transform == "experts":
            kind = self._stack_kind(sources[0], expected[0][0])
            if kind is None:
                return None
            if kind == "MXFP4":
                sources = _packed_names(sources[0])
            transform = "packed_experts" if kind == "MXFP4" else "experts"
            return TensorSpec(name, shape, row.cls, layer, sources, transform, kind, self.config.moe.experts)
        if self._is_packed(sources[0]):
            if row.transform != "copy" or len(shape) != 2:
                raise InputError(
                    f"{sources[0]}_packed is MXFP4, but {name} needs plain weights",
                    "only plain linear layers and routed experts may be packed; convert this tensor to BF16 first",
                )
            self._check_packed(sources[0], expected[0][0])
            return TensorSpec(name, shape, row.cls, layer, _packed_names(sources[0]), "packed", "MXFP4")
        present = [source in self.tensors for source in sources]
        if not any(present) and row.when_missing == "zeros":
            self.zeros.append(sources[0])
            return TensorSpec(name, shape, row.cls, layer, (), "zeros", "F32")
        if not all(present):
            self.missing += [source for source, there in zip(sources, present, strict=True) if not there]
            return None
        kinds = [self._check_plain(source, allowed) for source, allowed in zip(sources, expected, strict=True)]
        kind = kinds[0] if row.transform in ("copy", "head_keys", "head_values") else "F32"
        return TensorSpec(name, shape, row.cls, layer, sources, row.transform, kind)

    def _is_packed(self, name: str) -> bool:
        """Whether MXFP4 data stands for ``name``; packed or scale alone is a fault."""
        packed, scale = (leaf in self.tensors for leaf in _packed_names(name))
        if packed != scale:
            there, absent = _packed_names(name) if packed else reversed(_packed_names(name))
            raise InputError(
                f"{self._at(there)} has no {absent}",
                "MXFP4 weights need both; if the checkpoint is complete in its origin, download it again",
            )
        if packed and name in self.tensors:
            raise InputError(f"the checkpoint holds both {name} and {name}_packed", "keep one of the two")
        return packed

    def _stack_kind(self, pattern: str, shape: tuple[int, ...]) -> str | None:
        """MXFP4, BF16 or F32 for a whole stack of experts; None after noting that some are missing."""
        kinds: dict[str, int] = {}
        absent = []
        for expert in range(self.config.moe.experts):
            name = pattern.format(e=expert)
            if self._is_packed(name):
                self._check_packed(name, shape)
                kinds.setdefault("MXFP4", expert)
            elif name in self.tensors:
                kinds.setdefault(self._check_plain(name, (shape,)), expert)
            else:
                absent.append(name)
        if len(kinds) > 1:
            shown = ", ".join(f"{kind} (first: expert {expert})" for kind, expert in kinds.items())
            raise InputError(
                f"the experts of {pattern} are of different kinds: {shown}",
                "a stack is written as one tensor; store all its experts alike",
            )
        self.missing += absent
        return None if absent else next(iter(kinds))

    def _check_packed(self, name: str, shape: tuple[int, ...]) -> None:
        packed, scale = _packed_names(name)
        rows, columns = shape
        if columns % _CODES_PER_SCALE:
            raise InputError(
                f"{packed}: rows of {columns} weights are not whole MXFP4 blocks of {_CODES_PER_SCALE}",
                "convert this tensor to BF16 first",
            )
        if self.tensors[packed].dtype != "U8":
            raise self._dtype_fault(packed, ("U8",))
        if self.tensors[scale].dtype not in _SCALE_DTYPES:
            raise self._dtype_fault(scale, sorted(_SCALE_DTYPES))
        for leaf, width in ((packed, columns // _CODES_PER_BYTE), (scale, columns // _CODES_PER_SCALE)):
            if self.tensors[leaf].shape != (rows, width):
                raise self._shape_fault(leaf, ((rows, width),), f" (for a weight of {[rows, columns]})")
            self.used.add(leaf)

    def _check_plain(self, name: str, allowed: tuple[tuple[int, ...], ...]) -> str:
        tensor = self.tensors[name]
        if tensor.dtype not in _PLAIN_DTYPES:
            raise self._dtype_fault(name, sorted(_PLAIN_DTYPES))
        if tensor.shape not in allowed:
            raise self._shape_fault(name, allowed)
        self.used.add(name)
        return tensor.dtype

    def _check_leaves(self) -> None:
        """Refuse quantization formats that are not MXFP4 before anything else is said about their tensors."""
        strange: Counter[str] = Counter()
        example: dict[str, str] = {}
        for name in self.tensors:
            leaf = name.rpartition(".")[2]
            if name.startswith(VISION_PREFIXES):
                continue
            if leaf not in _LEAVES and any(word in leaf for word in _QUANTIZATION_WORDS):
                strange[leaf] += 1
                example.setdefault(leaf, name)
        if strange:
            leaf, count = strange.most_common(1)[0]
            raise InputError(
                f"{count} tensors end in .{leaf}, an unknown quantization; the first is {self._at(example[leaf])}",
                "weights may be BF16, F32, or MXFP4 as weight_packed + weight_scale",
            )

    def _check_missing(self) -> None:
        if self.missing:
            raise InputError(
                f"the checkpoint lacks {_listed(self.missing)}, which the config asks for",
                "check that all shards are there, and that config.json belongs to them",
            )

    def _left_out(self) -> tuple[SourceTensor, ...]:
        left, extra = [], []
        unused: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            if name in self.used:
                continue
            bare = name.removeprefix(TEXT_PREFIX)
            layer = _LAYER.match(bare)
            if bare.startswith(VISION_PREFIXES):
                left.append(tensor)
            elif _MTP.match(bare) or (layer and int(layer[1]) >= self.config.n_layers):
                left.append(tensor)
                unused["tensors"] += 1
                unused["bytes"] += tensor.nbytes
            else:
                extra.append(name)
        if extra:
            raise InputError(
                f"{self._at(extra[0])} has no place in {self.config.arch}"
                + (f", nor have {_listed(extra[1:])}" if len(extra) > 1 else ""),
                "every tensor must be converted or known to be left out; is this a variant of the architecture?",
            )
        if unused:
            self.warnings.append(
                f"{unused['tensors']} tensors of multi-token prediction or of layers past the last "
                f"({unused['bytes']:,} bytes) are left out: kimi-k3 GGUF has no place for them"
            )
        return tuple(left)

    def _at(self, name: str) -> str:
        """``name`` with the shard that holds it, where known."""
        shard = self.tensors[name].shard
        return f"{name} ({self.shards[shard].name})" if shard < len(self.shards) else name

    def _dtype_fault(self, name: str, allowed: Sequence[str]) -> InputError:
        return InputError(
            f"{self._at(name)} is {self.tensors[name].dtype}; expected {' or '.join(allowed)}",
            "weights may be BF16, F32, or MXFP4 as weight_packed + weight_scale",
        )

    def _shape_fault(self, name: str, allowed: Sequence[tuple[int, ...]], why: str = "") -> InputError:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        return InputError(
            f"{self._at(name)} has shape {list(self.tensors[name].shape)}; the config asks for {wanted}{why}",
            "config.json and shards must belong to the same model",
        )


def _packed_names(name: str) -> tuple[str, str]:
    return f"{name}_packed", f"{name}_scale"


def _listed(names: Sequence[str]) -> str:
    """Up to four names and the count of all."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{len(names)} tensors: {shown} ..."
