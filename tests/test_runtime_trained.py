"""The trained model in the runtime: every recipe runs, and loses what its bits let one expect."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from runtime_support import (
    ReferenceRun,
    check_close,
    choices_differ,
    divergence,
    log_probs,
    run_engine,
    run_reference,
)

import kimi_gguf
from kimi_gguf import convert
from kimi_gguf.cluster.llama_engine import Decoded
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference import tokenizer
from kimi_gguf.reference.options import preset
from kimi_gguf.reference.stores import open_store
from quant.recipes import RECIPES

pytestmark = pytest.mark.runtime

FOLDER = Path(kimi_gguf.__file__).parent / "data" / "tiny-k31"
LENGTH = 640
# From the least loss to the most.
ORDER = ("MXFP4_MOE", "Q6_K", "Q4_K_M", "Q3_K_M", "Q2_K")


@dataclass(frozen=True)
class Trained:
    """The model, its importance matrix, a held-out text, and what the reference makes of it."""

    work: Path
    imatrix: Path
    ids: list[int]
    reference: ReferenceRun

    def converted(self, quant: str) -> Path:
        """The model as a GGUF of a recipe; made once."""
        path = self.work / f"{quant}.gguf"
        if not path.exists():
            matrix = str(self.imatrix) if RECIPES[quant].needs_imatrix else None
            convert(str(FOLDER), quant=quant, outfile=str(path), imatrix=matrix)
        return path


@pytest.fixture(scope="module")
def trained(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    work = tmp_path_factory.mktemp("trained")
    text = (FOLDER / "heldout.txt").read_text()
    ids = tokenizer.encoding((FOLDER / "tiktoken.model").read_bytes()).encode_ordinary(text)
    reference = run_reference(open_store(FOLDER), ids[:LENGTH], preset("llama.cpp"))
    # The matrix comes from text behind the measured one.
    calibration = work / "calibration.txt"
    calibration.write_text(text[len(text) // 2 :])
    model = work / "MXFP4.gguf"
    convert(str(FOLDER), quant="MXFP4", outfile=str(model))
    imatrix = work / "imatrix.gguf"
    command = [runtime.program("llama-imatrix"), "-m", model, "-f", calibration, "-o", imatrix]
    command += ["-c", "512", "--chunks", "6", "-t", "1"]
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=300)
    return Trained(work, imatrix, ids[:LENGTH], reference)


def perplexity(run: Decoded | ReferenceRun, ids: list[int]) -> float:
    """Of the text's tokens after the first."""
    scores = log_probs(run.logits)[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp(-scores.mean()))


def overlap(ours: Decoded | ReferenceRun, theirs: Decoded | ReferenceRun) -> float:
    """Mean share of each token's experts that are the same."""
    shares = [
        np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(ours.experts[layer], chosen, strict=True)])
        for layer, chosen in theirs.experts.items()
    ]
    return float(np.mean(shares))


def test_in_float32_it_is_the_reference(trained: Trained, runtime: Runtime) -> None:
    engine = run_engine(trained.converted("F32"), trained.ids, runtime)
    check_close(engine, trained.reference, 2e-3)
    assert overlap(engine, trained.reference) >= 0.999


def test_the_lossless_file_differs_by_the_rounding_of_activations_alone(trained: Trained, runtime: Runtime) -> None:
    engine = run_engine(trained.converted("MXFP4"), trained.ids, runtime)
    assert divergence(engine.logits, trained.reference.logits).mean() <= 1e-4
    assert overlap(engine, trained.reference) >= 0.99


def test_more_bits_lose_less(trained: Trained, runtime: Runtime, say: Callable[[str], None]) -> None:
    base = run_engine(trained.converted("MXFP4"), trained.ids, runtime)
    say(f"{'recipe':10} {'mean KL':>9} {'perplexity':>10} {'experts':>8}")
    say(f"{'MXFP4':10} {0:9.5f} {perplexity(base, trained.ids):10.4f} {1:8.4f}")
    losses = []
    for quant in ORDER:
        run = run_engine(trained.converted(quant), trained.ids, runtime)
        losses.append(float(divergence(run.logits, base.logits).mean()))
        say(f"{quant:10} {losses[-1]:9.5f} {perplexity(run, trained.ids):10.4f} {overlap(run, base):8.4f}")
    assert losses == sorted(losses)
    assert losses[0] > 0


@pytest.mark.parametrize("quant", list(RECIPES))
def test_every_recipe_loads_and_runs(quant: str, trained: Trained, runtime: Runtime) -> None:
    ids = trained.ids[:96]
    run = run_engine(trained.converted(quant), ids, runtime)
    assert run.logits.shape == (96, 1280)
    loss = divergence(run.logits, trained.reference.logits[:96]).mean()
    # Two bits and fewer ruin so small a model; what a wrong layout gives is far worse, or not a number.
    assert loss < (0.5 if quant.startswith(("IQ1", "IQ2")) else 0.2)


def test_the_indexer_selects_what_the_reference_selects(trained: Trained, runtime: Runtime) -> None:
    engine = run_engine(trained.converted("F32"), trained.ids, runtime)
    assert sorted(engine.selections) == sorted(trained.reference.selections)
    assert choices_differ(engine, trained.reference).mean() <= 0.01
    top_k = max(len(row) for row in engine.selections[3])
    assert top_k < LENGTH
