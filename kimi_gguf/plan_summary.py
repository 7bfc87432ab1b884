"""A plan as people and programs read it: sizes by type, files, and every type that is not the recipe's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convert.domain import Plan, TensorSpec
from convert.plan import Choices
from convert.shapes import released_config, released_specs, text_sources, vision_sources
from kimi_gguf.sizes import SizedTensor, SizeReport, size_report
from kimi_gguf.type_table import TypeRow, type_rows
from quant.recipe_rules import fit_rows
from quant.recipes import Assignment, assign, resolve
from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType, block_bytes, block_size, nbytes, parse_type

_LAYER = re.compile(r"^blk\.\d+\.")


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor whose type is not the one that the recipe names; ``added`` bytes, negative when it is smaller."""

    name: str
    recipe_type: str
    type: str
    reason: str
    nbytes: int
    added: int


@dataclass(frozen=True, slots=True)
class PlannedName:
    """One output file: its final name and exact size."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What one ``--quant`` would give.

    Attributes:
        quant: recipe name.
        needs_imatrix: the recipe cannot be written without an importance matrix.
        arch: GGUF architecture.
        encoder: ``ggml`` or ``native``; empty for a released shape.
        sizes: tensor data by type.
        source_expert_bits: bits per weight of the experts in the checkpoint.
        files: output files; empty for a released shape, whose header cannot be known without its vocabulary.
        nbytes: of all files, header included; None for a released shape.
        changes: tensors whose type is not the recipe's.
        left_out: number and bytes of checkpoint tensors that the text model does not hold.
        warnings: sentences.
        table: text recipe that gives the types, where no recipe by name does; ``types`` tells them in short.
    """

    quant: str
    needs_imatrix: bool
    arch: str
    encoder: str
    sizes: SizeReport
    source_expert_bits: float
    files: tuple[PlannedName, ...]
    nbytes: int | None
    changes: tuple[Change, ...]
    left_out: tuple[int, int]
    warnings: tuple[str, ...]
    table: str = ""
    types: tuple[TypeRow, ...] = ()

    @property
    def grows_experts(self) -> bool:
        """Whether the experts take more bits than the checkpoint gives them."""
        return self.sizes.experts.bits > self.source_expert_bits

    @property
    def added_bytes(self) -> int:
        """Bytes that floors, overrides and fallbacks add to what the recipe gives in llama.cpp."""
        return sum(change.added for change in self.changes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "quant": self.quant,
            "needs_imatrix": self.needs_imatrix,
            "architecture": self.arch,
            "encoder": self.encoder or None,
            "bytes": self.nbytes,
            **self.sizes.to_dict(),
            "source_expert_bits_per_weight": round(self.source_expert_bits, 4),
            "files": [{"name": f.name, "bytes": f.nbytes} for f in self.files],
            "changes": [
                {
                    "tensor": c.name,
                    "recipe_type": c.recipe_type,
                    "type": c.type,
                    "reason": c.reason,
                    "bytes": c.nbytes,
                    "added_bytes": c.added,
                }
                for c in self.changes
            ],
            "left_out": {"tensors": self.left_out[0], "bytes": self.left_out[1]},
            "warnings": list(self.warnings),
            **({"types": [row.to_dict() for row in self.types], "recipe": self.table} if self.table else {}),
        }


@dataclass(frozen=True, slots=True)
class ChangeGroup:
    """Changes of the same tensor in several layers, ``blk.*.ssm_f_b.weight``."""

    pattern: str
    tensors: int
    recipe_type: str
    type: str
    reason: str
    nbytes: int
    added: int


def grouped(changes: Sequence[Change]) -> list[ChangeGroup]:
    """Changes with the layer number folded away, largest addition first."""
    groups: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in changes:
        pattern = _LAYER.sub("blk.*.", change.name)
        groups.setdefault((pattern, change.recipe_type, change.type, change.reason), []).append(change)
    result = [
        ChangeGroup(pattern, len(same), wanted, got, reason, sum(c.nbytes for c in same), sum(c.added for c in same))
        for (pattern, wanted, got, reason), same in groups.items()
    ]
    return sorted(result, key=lambda g: (-abs(g.added), g.pattern))


def summarize(plan: Plan) -> PlanSummary:
    """The summary of a plan; header bytes are not kept."""
    needs_imatrix = not plan.table and resolve(plan.recipe).needs_imatrix
    specs = [tensor.spec for tensor in plan.tensors]
    assignments = [Assignment(t.qtype, t.recipe_type, t.reason) for t in plan.tensors]
    return PlanSummary(
        quant=plan.recipe,
        needs_imatrix=needs_imatrix,
        arch=plan.arch,
        encoder=plan.encoder,
        sizes=_sizes(specs, assignments),
        source_expert_bits=_source_expert_bits(specs),
        files=tuple(PlannedName(file.name, file.nbytes) for file in plan.files),
        nbytes=plan.nbytes,
        changes=_changes(specs, assignments),
        left_out=(len(plan.left_out), sum(tensor.nbytes for tensor in plan.left_out)),
        warnings=plan.warnings,
        table=plan.table,
        types=type_rows(plan.tensors) if plan.table else (),
    )


def summarize_shape(shape: str, every: Sequence[Choices], *, has_imatrix: bool = False) -> list[PlanSummary]:
    """Sizes of a released model, without its files, for each of ``every``.

    Recipes that need an importance matrix are sized as if they had one.

    Raises:
        UsageError: an unknown shape, or choices that do not fit the model.
    """
    config = released_config(shape)
    specs = released_specs(config)
    tensors = [RecipeTensor(s.name, s.cls, s.shape, s.layer, s.source_type) for s in specs]
    vision = vision_sources()
    left_out = (sum(p.count for p in vision), sum(p.nbytes for p in vision))
    summaries = []
    for choices in every:
        recipe = resolve(choices.quant)
        assignments = assign(
            recipe.name,
            tensors,
            n_layers=config.n_layers,
            has_imatrix=has_imatrix or recipe.needs_imatrix,
            overrides=choices.tensor_types,
            output_type=choices.output_type,
            embedding_type=choices.embedding_type,
            allow_fallback=choices.allow_fallback,
            force=choices.force,
        )
        summaries.append(
            PlanSummary(
                quant=recipe.name,
                needs_imatrix=recipe.needs_imatrix,
                arch=config.arch,
                encoder="",
                sizes=_sizes(specs, assignments),
                source_expert_bits=_source_expert_bits(specs),
                files=(),
                nbytes=None,
                changes=_changes(specs, assignments),
                left_out=left_out,
                warnings=(),
            )
        )
    return summaries


def shape_source(shape: str) -> tuple[int, int]:
    """Tensors and payload bytes of a released checkpoint, vision included.

    Raises:
        UsageError: an unknown shape.
    """
    patterns = (*text_sources(released_config(shape)), *vision_sources())
    return sum(p.count for p in patterns), sum(p.nbytes for p in patterns)


def _sizes(specs: Sequence[TensorSpec], assignments: Sequence[Assignment]) -> SizeReport:
    return size_report(
        SizedTensor(a.qtype, math.prod(s.shape), nbytes(a.qtype, s.shape), s.cls is TensorClass.ROUTED_EXPERT)
        for s, a in zip(specs, assignments, strict=True)
    )


def _source_expert_bits(specs: Sequence[TensorSpec]) -> float:
    experts = [s for s in specs if s.cls is TensorClass.ROUTED_EXPERT]
    weights = sum(math.prod(s.shape) for s in experts)
    return sum(math.prod(s.shape) * _bits(parse_type(s.source_type)) for s in experts) / weights if weights else 0.0


def _changes(specs: Sequence[TensorSpec], assignments: Sequence[Assignment]) -> tuple[Change, ...]:
    changes = []
    for spec, a in zip(specs, assignments, strict=True):
        if a.reason is not None:
            size = nbytes(a.qtype, spec.shape)
            changes.append(Change(spec.name, a.recipe_type.name, a.qtype.name, a.reason, size, size - _base(spec, a)))
    return tuple(changes)


def _base(spec: TensorSpec, assignment: Assignment) -> int:
    """Bytes of the tensor as llama.cpp's quantizer would write it; for its own fallbacks, as the recipe names it."""
    fitted = fit_rows(assignment.recipe_type, spec.shape[-1])
    if fitted is not assignment.qtype:
        return nbytes(fitted, spec.shape)
    return round(math.prod(spec.shape) * _bits(assignment.recipe_type) / 8)


def _bits(qtype: QuantType) -> float:
    return 8 * block_bytes(qtype) / block_size(qtype)
