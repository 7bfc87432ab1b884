"""The domain model: what a checkpoint holds, what a GGUF will hold, and the plan between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quant.native import EncodeStats
from quant.tensors import TensorClass
from quant.types import QuantType


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a safetensors shard.

    Attributes:
        name: name in the checkpoint.
        dtype: safetensors dtype (``BF16``, ``F32``, ``U8``, ``F8_E8M0`` ...).
        shape: row-major shape.
        shard: index into ``Source.shards``.
        begin, end: byte range, from the start of the shard file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: name, size in bytes, SHA-256 of its JSON header, and of all of it where that is known."""

    name: str
    nbytes: int
    header_sha256: str
    sha256: str | None = None


class Source(Protocol):
    """Where a checkpoint's bytes come from: a folder, or the Hub.

    ``origin`` is the checkpoint's address: a folder, or ``hf://owner/name@commit``.
    ``acquire`` makes a shard readable and ``release`` says that nobody will read it again;
    both are no-ops for a folder. ``read_into`` may be called from several threads.
    ``stamp`` is a short text that differs once a shard's bytes may have changed (size and time of change of a file,
    hash of a blob); it is compared between plan, reading, and resumed runs.
    """

    @property
    def label(self) -> str: ...
    @property
    def origin(self) -> str: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def revision(self) -> str | None: ...
    def read_file(self, name: str) -> bytes | None:
        """A small side file (config.json, tiktoken.model ...), or None when the checkpoint has none."""
        ...

    def stamp(self, shard: int) -> str: ...
    def acquire(self, shard: int) -> None: ...
    def read_into(self, shard: int, offset: int, buffer: memoryview) -> None: ...
    def release(self, shard: int) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One GGUF tensor and where its values come from.

    Attributes:
        name: GGUF name.
        shape: row-major shape (ggml's ``ne`` reversed).
        cls: tensor class.
        layer: 0-based layer or None.
        sources: checkpoint names; ``{e}`` in a name stands for the expert index 0 .. ``experts`` - 1.
        transform: name of a transform of ``convert.transforms``.
        source_type: ``MXFP4``, ``BF16`` or ``F32``.
        experts: number of stacked experts, 0 when the tensor is not a stack.
    """

    name: str
    shape: tuple[int, ...]
    cls: TensorClass
    layer: int | None
    sources: tuple[str, ...]
    transform: str
    source_type: str
    experts: int = 0


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor with its place: type, split file, offset from the start of that file, bytes."""

    spec: TensorSpec
    qtype: QuantType
    file: int
    offset: int
    nbytes: int
    recipe_type: QuantType
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One output file: final name, exact header bytes, total size."""

    name: str
    header: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a conversion before a byte is moved.

    ``digest`` is a SHA-256 over all that decides output bytes (headers, tensor sources and types, encoder,
    imatrix, source header hashes), so that a resumed run can prove that it continues the same job.
    ``table`` is the text recipe that gave the types, where no recipe by name did.
    """

    arch: str
    recipe: str
    encoder: str
    files: tuple[PlannedFile, ...]
    tensors: tuple[PlannedTensor, ...]
    left_out: tuple[SourceTensor, ...]
    warnings: tuple[str, ...]
    digest: str
    table: str = ""

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files)


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Rows [row_begin, row_end) of one planned tensor, flattened to two axes; at most 16 Mi weights."""

    tensor: int
    row_begin: int
    row_end: int


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a finished conversion left behind; no files and no manifest after a dry run.

    ``recipe`` is the text recipe that was written for a target size. ``encoded`` tells, by type, what our encoders did
    to the blocks of this run: how many, how many of them exactly, and how many with scales outside fp16's normal range.
    """

    plan: Plan
    files: tuple[Path, ...]
    manifest: Path | None
    seconds: float
    resumed_units: int = 0
    notes: tuple[str, ...] = field(default=())
    recipe: Path | None = None
    encoded: Mapping[str, EncodeStats] = field(default_factory=dict)
