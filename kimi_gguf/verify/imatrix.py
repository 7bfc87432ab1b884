"""Importance matrices on one machine: the function behind ``kimi-gguf imatrix``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from convert.config import ModelConfig
from convert.disk import disk_faults, free_bytes
from kimi_gguf.reference.options import preset as reference_preset
from kimi_gguf.verify import importance
from kimi_gguf.verify.models import open_model
from kimi_gguf.verify.observations import NoProgress, Progress
from kimi_gguf.verify.places import check_outfile, is_imatrix, parse_memory
from kimi_gguf.verify.stream import StreamSettings, run_stream
from kimi_gguf.verify.stream_plan import layer_rows
from kimi_gguf.verify.text import read_tokens
from quant.errors import OutputError, UsageError
from quant.imatrix import Imatrix

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ImatrixResult:
    """A finished importance matrix.

    Attributes:
        path: of the file; entries: weight matrices in it.
        tokens, chunks, context: that this run saw; merged_chunks: those of merged files.
        coverage: of experts, merged files included; None without routed experts.
        settings: of the run.
    """

    path: Path
    entries: int
    tokens: int
    chunks: int
    context: int
    merged_chunks: int
    coverage: importance.ExpertCoverage | None
    seconds: float
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "kimi-gguf imatrix",
            "path": str(self.path),
            "entries": self.entries,
            "tokens": self.tokens,
            "chunks": self.chunks,
            "context": self.context,
            "merged_chunks": self.merged_chunks,
            "coverage": None if self.coverage is None else self.coverage.to_dict(),
            "seconds": round(self.seconds, 3),
            "settings": self.settings,
        }


def imatrix(
    src: PathLike,
    *,
    text: PathLike,
    outfile: PathLike = "imatrix.gguf",
    tokens: int | None = None,
    context: int = 512,
    memory: str | int = "20G",
    device: str = "cpu",
    scratch: PathLike | None = None,
    resume: bool = False,
    in_file: Sequence[PathLike] = (),
    prior: int = importance.DEFAULT_PRIOR,
    preset: str = "llama.cpp",
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> ImatrixResult:
    """Run a model over a text and store how large the inputs of each weight matrix are.

    Args:
        src: folder of a checkpoint, or a GGUF.
        text: UTF-8 text; outfile: where the matrix goes, in llama.cpp's GGUF form.
        tokens: stop after so many; context: tokens per independent chunk.
        memory: bytes to stay within, ``20G`` for example.
        device: a torch device.
        scratch: folder for hidden states; resume: continue an interrupted run.
        in_file: importance matrices of earlier runs over the same model, added up.
        prior: experts reached by fewer tokens are filled up to so many (``importance``); 0 leaves all as they are.
        preset: conventions of the reference, ``llama.cpp`` or ``official``.

    Raises:
        UsageError: parameters that make no sense.
        InputError: the model, the text or a file to merge cannot be used.
    """
    begin = time.monotonic()
    if prior < 0:
        raise UsageError(f"--prior {prior} is negative", "give a number of tokens; 0 stores the plain sums")
    target = Path(outfile)
    check_outfile(target, "importance matrix", is_imatrix)
    # What could not be merged in the end is refused at the beginning.
    others = [(Path(path), importance.read_sums(Path(path))) for path in in_file]
    settings = StreamSettings(
        memory=parse_memory(memory),
        device=device,
        scratch=None if scratch is None else Path(scratch),
        resume=resume,
        # The keys' and values' halves of kv_b have inputs of their own only in the absorbed form.
        options=replace(reference_preset(preset), absorbed=True),
        observe=False,
        progress=progress or NoProgress(),
        note=note,
    )
    with open_model(Path(src)) as model:
        config = model.store.config
        _check_room(target, config)
        seen = read_tokens(Path(text), model.vocabulary, config.vocab_size, context=context, tokens=tokens)
        collector = importance.Collector(config.moe.experts)
        sums: dict[str, importance.Sums] = {}
        datasets, chunks = [seen.text_name], seen.chunks
        found: importance.ExpertCoverage | None = None

        def store() -> None:
            nonlocal sums, datasets, chunks, found
            sums = collector.collected()
            for path, (theirs, names, theirs_chunks, size) in others:
                importance.merge(sums, theirs, str(path))
                datasets += names
                chunks += theirs_chunks * (size or context) // context
            found = importance.coverage(sums, prior)
            with disk_faults(target):
                Imatrix.save(
                    target,
                    importance.entries(sums, prior),
                    datasets=datasets,
                    chunk_count=chunks,
                    chunk_size=context,
                    notes=importance.notes(sums, found, prior),
                )

        kept = run_stream([model], seen, collector, settings, tap=collector, conclude=store)
    return ImatrixResult(
        path=target,
        entries=len(sums),
        tokens=seen.tokens,
        chunks=seen.chunks,
        context=context,
        merged_chunks=chunks - seen.chunks,
        coverage=found,
        seconds=time.monotonic() - begin,
        settings=kept,
    )


def _check_room(path: Path, config: ModelConfig) -> None:
    """Refuse a disk that has no room for the matrix: a float32 number for each column of each slice of each matrix."""
    shapes = [shape for layer in range(config.n_layers) for _, shape in layer_rows(config, layer) if len(shape) > 1]
    needed = 4 * sum(prod(shape[:-2]) * shape[-1] for shape in shapes)
    free = free_bytes(path.parent)
    if free < needed:
        raise OutputError(
            f"{path}: the importance matrix takes {needed:,} bytes, {free:,} are free",
            "free some space, or name another place with --outfile",
        )
