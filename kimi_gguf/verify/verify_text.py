"""The result of ``verify`` for people: what was compared by class, then every fault by name."""

from __future__ import annotations

from kimi_gguf.console import table
from kimi_gguf.verify.verdicts import NAMED_CLASSES, ClassSummary, VerifyReport

_SHOWN = 40
_NAMED = frozenset(cls.value for cls in NAMED_CLASSES)


def verify_text(report: VerifyReport) -> str:
    """Table of classes, faults, and the verdict in the last line."""
    lines = [
        f"{report.model} ({report.arch}) against {report.source}",
        "",
        table(
            ("class", ">tensors", "types", "compared by", ">rows read", ">worst error", "result"),
            [_row(summary) for summary in report.classes()],
        ),
        "",
    ]
    if report.encoders:
        used = ", ".join(f"{name} ({count} tensors)" for name, count in sorted(report.encoders.items()))
        lines += [f"encoders recognised: {used}", ""]
    faults = [f"structure: {fault}" for fault in report.structure]
    for tensor in report.failed:
        faults += [f"{tensor.name}: {fault}" for fault in tensor.faults]
    if faults:
        lines += [f"  {fault}" for fault in faults[:_SHOWN]]
        lines += [f"  and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines.append("")
    lines.append(verdict_line(report))
    return "\n".join(lines)


def verdict_line(report: VerifyReport) -> str:
    """One sentence."""
    read = f"{report.bytes_read:,} bytes read in {report.seconds:.1f} s"
    extent = "every row" if report.share >= 1 else f"{100 * report.share:g} % of the rows (seed {report.seed})"
    if report.ok:
        return f"ok: {len(report.tensors)} tensors are what the checkpoint makes them, {extent}, {read}"
    broken = [f"{len(report.failed)} of {len(report.tensors)} tensors"] if report.failed else []
    broken += [f"{len(report.structure)} faults of structure"] if report.structure else []
    return f"WRONG: {' and '.join(broken)}; {extent}, {read}"


def _row(summary: ClassSummary) -> tuple[object, ...]:
    name = summary.cls or "unknown"
    error = "-" if summary.worst_error is None else f"{summary.worst_error:.3g}"
    return (
        f"{name} *" if name in _NAMED else name,
        summary.tensors,
        ", ".join(summary.qtypes) or "-",
        ", ".join(summary.methods),
        f"{summary.checked / max(summary.rows, 1):.1%}",
        error,
        f"{summary.failed} WRONG" if summary.failed else "ok",
    )
