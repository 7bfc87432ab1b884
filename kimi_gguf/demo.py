"""The demonstration: the tiny trained K3.1 that is shipped, converted, inspected, and run where a runtime is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from convert.progress import Progress
from convert.vocab import parse_ranks
from kimi_gguf import api
from kimi_gguf.cluster import runtime
from kimi_gguf.cluster.generate import generate
from kimi_gguf.cluster.llama_engine import EngineOptions, LlamaEngine
from kimi_gguf.inspection import Inspection
from kimi_gguf.plan_summary import PlanSummary
from quant.errors import KimiGgufError, UsageError

DEFAULT_DIRECTORY = "kimi-gguf-demo"
NAME = "Tiny-K3.1"
QUANT = "Q4_K_M"
PROMPT = ("She", " had", " been")
"""Each a token of the shipped vocabulary."""
TOKENS = 96
SEED = 31

_MARK = ".made-by-kimi-gguf-demo"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demonstration made.

    ``predicted`` and ``actual`` bytes are those of the GGUF file; ``text`` is what the model wrote, or None when no
    runtime is built.
    """

    checkpoint: Path
    file: Path
    manifest: Path | None
    plan: PlanSummary
    inspection: Inspection
    predicted: int
    actual: int
    seconds: float
    text: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint),
            "file": str(self.file),
            "manifest": None if self.manifest is None else str(self.manifest),
            "predicted_bytes": self.predicted,
            "actual_bytes": self.actual,
            "seconds": round(self.seconds, 3),
            "text": self.text,
            "plan": self.plan.to_dict(),
            "inspection": self.inspection.to_dict(),
        }


def tiny_checkpoint() -> Path:
    """The folder of the tiny trained K3.1 checkpoint that is shipped, in the released format."""
    return Path(str(resources.files("kimi_gguf") / "data" / "tiny-k31"))


def demo(
    directory: str | os.PathLike[str] = DEFAULT_DIRECTORY,
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> DemoResult:
    """Convert the tiny trained checkpoint to Q4_K_M in ``directory``, inspect the file, let the model write.

    The folder is kept. One that an earlier run made is used again; one with other content is refused. Text is written
    only where ``kimi-gguf runtime build`` has been run.

    Args:
        directory: where the GGUF goes.
        note: told what happens, sentence by sentence.
        progress: of the conversion.

    Raises:
        UsageError: ``directory`` holds something that no earlier run made.
        KimiGgufError: as ``convert`` and ``inspect``.
    """
    home = Path(directory)
    _claim(home)
    checkpoint = tiny_checkpoint()
    note(f"a K3.1 of five layers with 16 experts in each, trained on novels, from {checkpoint}")
    (summary,) = api.plan(checkpoint, quant=QUANT, outdir=home, name=NAME)
    predicted = summary.nbytes or 0
    note(f"planned {QUANT}: {predicted:,} bytes in {len(summary.files)} file")
    result = api.convert(checkpoint, quant=QUANT, outdir=home, name=NAME, overwrite=True, progress=progress)
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
        text=_written(file, checkpoint / "tiktoken.model", note),
    )


def _written(file: Path, vocabulary: Path, note: Callable[[str], None]) -> str | None:
    """What the model writes after ``PROMPT``; None without a runtime, or with one that does not run here."""
    try:
        built = runtime.find()
    except KimiGgufError:
        note("the model writes a few sentences here once `kimi-gguf runtime build` has been run")
        return None
    try:
        return _continued(file, vocabulary, built)
    except KimiGgufError as error:
        note(f"the model writes nothing, since the runtime fails: {error}")
        return None


def _continued(file: Path, vocabulary: Path, built: runtime.Runtime) -> str:
    words = parse_ranks(vocabulary.read_bytes(), vocabulary.name)
    ids = {word: number for number, word in enumerate(words)}
    prompt = [ids[word.encode()] for word in PROMPT]
    with LlamaEngine(file, EngineOptions(n_ctx=512), runtime=built) as engine:
        tokens = [*prompt, *generate(engine, prompt, TOKENS, temperature=0.8, seed=SEED)]
    return b"".join(words[token] for token in tokens if token < len(words)).decode("utf-8", "replace")


def _claim(home: Path) -> None:
    """Take ``home``, which is new, empty, or of an earlier demonstration."""
    if home.exists() and not home.is_dir():
        raise UsageError(f"{home} is not a folder", "choose another --dir")
    if home.is_dir() and any(home.iterdir()) and not (home / _MARK).exists():
        raise UsageError(f"{home} holds something that no demonstration made", "choose another --dir")
    home.mkdir(parents=True, exist_ok=True)
    (home / _MARK).touch()
