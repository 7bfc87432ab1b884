"""What a check of a GGUF against its checkpoint found, as frozen values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quant.tensors import TensorClass

Method = Literal["bits", "re-encoded", "error bound", "none"]

NAMED_CLASSES = (
    TensorClass.ROUTER,
    TensorClass.ROUTER_BIAS,
    TensorClass.NORM,
    TensorClass.RESIDUAL_SCORE,
    TensorClass.KDA_STATE,
    TensorClass.KDA_CONV,
    TensorClass.KDA_LOW_RANK,
    TensorClass.INDEXER,
    TensorClass.INDEXER_WEIGHTS,
    TensorClass.MLA_ABSORBED,
)
"""Classes whose damage is small in bytes and large in effect; reports name each."""


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """One tensor of the GGUF, or one that should be there.

    Attributes:
        name: GGUF name.
        cls: tensor class; empty for a tensor that the architecture does not know.
        source_type, qtype: in the checkpoint and in the file; empty where there is none.
        method: ``bits`` where one sequence of bytes is right, ``re-encoded`` where an encoder that was recognised
            gives them, ``error bound`` where none was, ``none`` where nothing could be compared.
        encoder: what gave the bytes, for example ``native`` or ``ggml with importance``.
        rows, checked, wrong: rows of the tensor, those compared, and those that differ.
        error: relative RMS error of the decoded values against the checkpoint; None where nothing was decoded.
        allowed: largest ``error`` that the type explains; None unless ``method`` is ``error bound``.
        faults: what is wrong, as sentences; empty when the tensor passes.
    """

    name: str
    cls: str
    source_type: str
    qtype: str
    method: Method
    encoder: str
    rows: int
    checked: int
    wrong: int
    error: float | None
    allowed: float | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """All tensors of one class: how many, their types, how they were compared, and how many fail."""

    cls: str
    tensors: int
    failed: int
    qtypes: tuple[str, ...]
    methods: tuple[str, ...]
    rows: int
    checked: int
    worst_error: float | None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The whole check.

    Attributes:
        model, source: names of the file and of the checkpoint.
        arch: GGUF architecture.
        share: share of the rows that was asked for, 1 for all.
        seed: of the choice of rows.
        encoders: recognised encoders, with the number of tensors.
        structure: faults of keys, shapes, offsets, tokenizer; and of config against checkpoint.
        tensors: every tensor, in the order of the layout.
        warnings: what is unusual but not wrong.
        bytes_read: of both sides.
    """

    model: str
    source: str
    arch: str
    share: float
    seed: int
    encoders: dict[str, int]
    structure: tuple[str, ...]
    tensors: tuple[TensorVerdict, ...]
    warnings: tuple[str, ...]
    bytes_read: int
    seconds: float

    @property
    def failed(self) -> tuple[TensorVerdict, ...]:
        """Tensors with faults."""
        return tuple(tensor for tensor in self.tensors if tensor.faults)

    @property
    def ok(self) -> bool:
        """Whether the file is what the checkpoint makes it, as far as was looked."""
        return not self.structure and not self.failed

    def classes(self) -> tuple[ClassSummary, ...]:
        """One summary per class, those of ``NAMED_CLASSES`` first."""
        order = [cls.value for cls in NAMED_CLASSES]
        found = dict.fromkeys(tensor.cls for tensor in self.tensors)
        names = [name for name in order if name in found] + [name for name in found if name not in order]
        return tuple(_summary(name, [t for t in self.tensors if t.cls == name]) for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": "kimi-gguf verify",
            "version": 1,
            "ok": self.ok,
            **asdict(self),
            "classes": [asdict(summary) for summary in self.classes()],
        }


def _summary(name: str, tensors: list[TensorVerdict]) -> ClassSummary:
    errors = [t.error for t in tensors if t.error is not None]
    return ClassSummary(
        cls=name,
        tensors=len(tensors),
        failed=sum(bool(t.faults) for t in tensors),
        qtypes=tuple(dict(Counter(t.qtype for t in tensors if t.qtype).most_common())),
        methods=tuple(dict(Counter(t.method for t in tensors).most_common())),
        rows=sum(t.rows for t in tensors),
        checked=sum(t.checked for t in tensors),
        worst_error=max(errors) if errors else None,
    )
