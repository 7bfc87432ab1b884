"""Results of the verbs as text for people and as objects for programs; nothing here prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from convert.domain import ConvertResult
from kimi_gguf.console import table
from kimi_gguf.demo import DemoResult
from kimi_gguf.inspection import Inspection, plain_value
from kimi_gguf.plan_summary import PlanSummary, grouped, shape_source, summarize
from kimi_gguf.sizes import SizeReport, human_bytes
from kimi_gguf.type_table import type_table
from quant.native import EncodeStats

_MOST_FILES = 12
_LONGEST_VALUE = 80
_SHORT_ARRAY = 8


def plans_value(plans: Sequence[PlanSummary], shape: str | None) -> dict[str, Any]:
    """Plans as one object; for a released shape with the tensors and bytes of its checkpoint."""
    value: dict[str, Any] = {"plans": [plan.to_dict() for plan in plans]}
    if shape is not None:
        tensors, payload = shape_source(shape)
        value["shape"] = {"name": shape.lower(), "source_tensors": tensors, "source_bytes": payload}
    return value


def plan_text(plans: Sequence[PlanSummary], shape: str | None) -> str:
    """One plan in full, or a row for each of several."""
    first = plans[0]
    head = [_shape_line(first, shape)] if shape is not None else []
    body = _one_plan(first) if len(plans) == 1 else _plan_rows(plans, shape)
    return "\n\n".join([*head, body])


def conversion_value(result: ConvertResult) -> dict[str, Any]:
    """A finished conversion as an object."""
    return {
        **summarize(result.plan).to_dict(),
        "files": [str(path) for path in result.files],
        "manifest": None if result.manifest is None else str(result.manifest),
        **({} if result.recipe is None else {"recipe_file": str(result.recipe)}),
        "seconds": round(result.seconds, 3),
        "resumed_units": result.resumed_units,
        "notes": list(result.notes),
        "encoded": {name: asdict(stats) for name, stats in result.encoded.items()},
    }


def conversion_text(result: ConvertResult) -> str:
    """What was written, how large it is, and where it differs from the recipe."""
    summary = summarize(result.plan)
    lines = [f"{summary.arch} as {summary.quant}: {result.plan.nbytes:,} bytes in {result.seconds:.1f} s"]
    if result.resumed_units:
        lines.append(f"{result.resumed_units:,} units came from an earlier run")
    lines += [str(path) for path in result.files]
    if result.manifest is not None:
        lines.append(str(result.manifest))
    if result.recipe is not None:
        lines.append(str(result.recipe))
    lines += result.notes
    lines += [_exactness(name, stats) for name, stats in result.encoded.items()]
    types = [type_table(summary.types)] if summary.types else []
    return "\n\n".join(["\n".join(lines), *types, _sizes(summary.sizes), *_changes(summary)])


def _exactness(name: str, stats: EncodeStats) -> str:
    """What our encoder did to the blocks of one type."""
    # Rounded down: 100 % is all of them.
    share = math.floor(1000 * stats.exact / stats.blocks) / 10 if stats.blocks else 100.0
    clipped = f"; {stats.clipped:,} have a scale outside fp16's normal range" if stats.clipped else ""
    return f"{name}: {share:g}% of {stats.blocks:,} blocks exact{clipped}"


def inspection_text(found: Inspection, *, tensors: bool = False) -> str:
    """A GGUF's header: files, metadata, sizes, structure, and every tensor when asked."""
    title = " ".join(word for word in (found.name, f"({found.arch})" if found.arch else "", found.file_type) if word)
    files = table(
        ("file", ">bytes", ">tensors"), [(f.name, f"{f.nbytes:,}", f.tensors) for f in found.files[:_MOST_FILES]]
    )
    if len(found.files) > _MOST_FILES:
        files += f"\n... {len(found.files)} files, {found.nbytes:,} bytes"
    metadata = table(("key", "value"), [(key, _short(plain_value(v))) for key, v in found.metadata.items()])
    parts = [title, files, metadata, _sizes(found.sizes), _structure(found)]
    if tensors:
        rows = [(t.name, t.qtype.name, "x".join(map(str, t.shape)), f"{t.nbytes:,}") for t in found.tensors]
        parts.insert(3, table(("tensor", "type", "shape", ">bytes"), rows))
    return "\n\n".join(part for part in parts if part)


def demo_text(result: DemoResult) -> str:
    """The demonstration's file, and how well its size was predicted."""
    same = "equal" if result.predicted == result.actual else "NOT EQUAL"
    lines = [
        f"checkpoint  {result.checkpoint}",
        f"GGUF        {result.file}",
        f"size        {result.predicted:,} bytes predicted, {result.actual:,} written: {same}",
    ]
    written = [] if result.text is None else ["the model writes:", result.text]
    return "\n\n".join([inspection_text(result.inspection), *_changes(result.plan), "\n".join(lines), *written])


def _structure(found: Inspection) -> str:
    if not found.checked:
        return (
            f"structure: not checked; {found.arch or 'a file without general.architecture'} is not kimi-k3 or kimi-k31"
        )
    if found.faults:
        return f"structure: {len(found.faults)} faults"
    return f"structure: complete, as {found.arch} asks"


def _shape_line(plan: PlanSummary, shape: str | None) -> str:
    tensors, payload = shape_source(shape or "")
    return (
        f"{shape} as released: {tensors:,} checkpoint tensors, {payload:,} bytes ({human_bytes(payload)}), of which "
        f"{plan.left_out[0]} tensors, {plan.left_out[1]:,} bytes are vision and left out;\n"
        f"{plan.sizes.total.tensors:,} GGUF tensors. Sizes are of tensor data; a header of some 6 MB is added."
    )


def _one_plan(plan: PlanSummary) -> str:
    size = f"{plan.nbytes:,} bytes" if plan.nbytes is not None else f"{plan.sizes.total.nbytes:,} bytes of tensor data"
    lines = [f"{plan.arch} as {plan.quant}: {size}" + (f", encoder {plan.encoder}" if plan.encoder else "")]
    if plan.needs_imatrix:
        lines.append("needs an importance matrix (--imatrix)")
    parts = ["\n".join(lines)]
    if plan.files:
        rows = [(f.name, f"{f.nbytes:,}") for f in plan.files[:_MOST_FILES]]
        more = f"\n... {len(plan.files)} files" if len(plan.files) > _MOST_FILES else ""
        parts.append(table(("file", ">bytes"), rows) + more)
    if plan.table:
        parts.append(type_table(plan.types))
    parts += [_sizes(plan.sizes), *_changes(plan)]
    if plan.left_out[0]:
        parts.append(f"left out: {plan.left_out[0]:,} tensors, {plan.left_out[1]:,} bytes")
    return "\n\n".join(parts)


def _plan_rows(plans: Sequence[PlanSummary], shape: str | None) -> str:
    columns = ["quant", ">bytes", ">GB", ">bits/weight", ">experts", ">added by floors"]
    columns += ["note"] if shape is not None else [">files", "note"]
    rows = []
    for plan in plans:
        nbytes = plan.sizes.total.nbytes if plan.nbytes is None else plan.nbytes
        notes = ["needs an imatrix"] if plan.needs_imatrix else []
        notes += ["more bits than the source"] if plan.grows_experts else []
        row = [plan.quant, f"{nbytes:,}", f"{nbytes / 1e9:,.2f}", f"{plan.sizes.total.bits:.3f}"]
        row += [f"{plan.sizes.experts.bits:.3f}", f"{plan.added_bytes:,}"]
        rows.append([*row, *([] if shape is not None else [str(len(plan.files))]), ", ".join(notes)])
    return table(columns, rows)


def _sizes(sizes: SizeReport) -> str:
    rows = [(r.type, r.tensors, f"{r.weights:,}", f"{r.nbytes:,}", f"{r.bits:.3f}") for r in sizes.rows]
    named = [("experts", sizes.experts)] if sizes.experts.tensors else []
    for name, row in (*named, ("all", sizes.total)):
        rows.append((name, row.tensors, f"{row.weights:,}", f"{row.nbytes:,}", f"{row.bits:.3f}"))
    return table(("type", ">tensors", ">weights", ">bytes", ">bits/weight"), rows)


def _changes(plan: PlanSummary) -> list[str]:
    """The table of types that are not the recipe's, when there are any."""
    if not plan.changes:
        return []
    rows = [
        (g.pattern, g.tensors, f"{g.recipe_type} -> {g.type}", f"{g.nbytes:,}", f"{g.added:+,}", g.reason)
        for g in grouped(plan.changes)
    ]
    head = f"not as the recipe names it: {len(plan.changes)} tensors, {plan.added_bytes:+,} bytes"
    return [head + "\n" + table(("tensor", ">count", "type", ">bytes", ">added", "reason"), rows)]


def _short(value: Any) -> str:
    """A metadata value on one line; of arrays the length and the first elements."""
    if isinstance(value, dict):
        text = f"{value['length']:,} elements: {value['first']}"
    elif isinstance(value, list) and len(value) > _SHORT_ARRAY:
        text = f"{len(value):,} elements: {value}"
    else:
        text = str(value)
    text = text.replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
