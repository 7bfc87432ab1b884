"""The demonstration: a tiny K3.1 checkpoint with the release's structure, converted and inspected."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.progress import Progress
from kimi_gguf import api
from kimi_gguf.inspection import Inspection
from kimi_gguf.plan_summary import PlanSummary
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import UsageError

DEFAULT_DIRECTORY = "kimi-gguf-demo"
QUANT = "Q4_K_M"
SEED = 31

_MARK = ".made-by-kimi-gguf-demo"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demonstration made: ``predicted`` and ``actual`` bytes are those of the GGUF file."""

    checkpoint: Path
    file: Path
    manifest: Path | None
    plan: PlanSummary
    inspection: Inspection
    predicted: int
    actual: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint),
            "file": str(self.file),
            "manifest": None if self.manifest is None else str(self.manifest),
            "predicted_bytes": self.predicted,
            "actual_bytes": self.actual,
            "seconds": round(self.seconds, 3),
            "plan": self.plan.to_dict(),
            "inspection": self.inspection.to_dict(),
        }


def demo(
    directory: str | os.PathLike[str] = DEFAULT_DIRECTORY,
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> DemoResult:
    """Make a tiny K3.1 checkpoint in ``directory``, convert it to Q4_K_M, inspect the file.

    The folder is kept. One that an earlier run made is used again; one with other content is refused.

    Args:
        directory: where everything goes.
        note: told what happens, sentence by sentence.
        progress: of the conversion.

    Raises:
        UsageError: ``directory`` holds something that no earlier run made.
        KimiGgufError: as ``convert`` and ``inspect``.
    """
    home = Path(directory)
    _claim(home)
    note(f"making a checkpoint of five layers, 16 experts in each, in {home / 'checkpoint'}")
    checkpoint = make_checkpoint(home / "checkpoint", TinyShape(), seed=SEED)
    (summary,) = api.plan(checkpoint, quant=QUANT, outdir=home)
    predicted = summary.nbytes or 0
    note(f"planned {QUANT}: {predicted:,} bytes in {len(summary.files)} file")
    result = api.convert(checkpoint, quant=QUANT, outdir=home, overwrite=True, progress=progress)
    (file,) = result.files
    note(f"converted in {result.seconds:.1f} s, every unit read back and checked")
    return DemoResult(
        checkpoint=checkpoint,
        file=file,
        manifest=result.manifest,
        plan=summary,
        inspection=api.inspect(file),
        predicted=predicted,
        actual=file.stat().st_size,
        seconds=result.seconds,
    )


def _claim(home: Path) -> None:
    """Take ``home``, which is new, empty, or of an earlier demonstration."""
    if home.exists() and not home.is_dir():
        raise UsageError(f"{home} is not a folder", "choose another --dir")
    if home.is_dir() and any(home.iterdir()) and not (home / _MARK).exists():
        raise UsageError(f"{home} holds something that no demonstration made", "choose another --dir")
    home.mkdir(parents=True, exist_ok=True)
    (home / _MARK).touch()
