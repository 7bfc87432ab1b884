"""Measures what quantization does to the tiny trained model, recipe by recipe, and writes docs/quality.md.

    python scripts/quality_table.py --work DIR [--out docs/quality.md] [--tokens N]

The checkpoint that ships with the package is converted to every recipe, with our encoder and ggml's, with and without
an importance matrix, and each file is compared with the checkpoint in the stream engine (float32). The held-out text
is cut in two: the matrix is made on the first part, everything is measured on the second. Files in DIR are kept and
used again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kimi_gguf
from kimi_gguf import convert, imatrix, inspect
from kimi_gguf.reference.options import preset
from kimi_gguf.verify import measures
from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.estimates import estimate_tokens
from kimi_gguf.verify.listeners import Quiet
from kimi_gguf.verify.models import OpenModel, open_model
from kimi_gguf.verify.observations import FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.result import Estimate
from kimi_gguf.verify.stream import StreamSettings, run_stream
from kimi_gguf.verify.text import read_tokens

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = Path(kimi_gguf.__file__).parent / "data" / "tiny-k31"
RECIPES = ("MXFP4", "MXFP4_MOE", "Q6_K", "Q4_K_M", "Q3_K_M", "Q3_K_XL", "Q2_K", "Q2_K_XL")
PAIRED = ("Q4_K_M", "Q3_K_M", "Q2_K")
CALIBRATION_SHARE = 0.4
AT_ONCE = 6
KL = measures.OUTPUT.index("kl")


@dataclass(frozen=True)
class Variant:
    """One file: a recipe, who encoded it, and whether an importance matrix was used."""

    recipe: str
    encoder: str
    weighed: bool

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.encoder}{'-imatrix' if self.weighed else ''}"


@dataclass(frozen=True)
class Measured:
    """What comparing one file with the checkpoint gave; ``kl`` F64 [tokens], NaN where nothing was predicted."""

    variant: Variant
    bits: float
    comparison: Comparison
    model: OpenModel

    @property
    def kl(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        values: np.ndarray[Any, np.dtype[np.float64]] = self.comparison.snapshot()["output"][:, KL]
        return values


class Fan(Quiet):
    """Compares the first model of a run with each of the others."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self.comparisons = comparisons

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None:
        for comparison, other in zip(self.comparisons, seen[1:], strict=True):
            comparison.layer(place, layer, seen[0], other)

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None:
        for comparison, other in zip(self.comparisons, logits[1:], strict=True):
            comparison.output(place, logits[0], other)


def variants() -> list[Variant]:
    """Every recipe with our encoder, without and with a matrix; three of them with ggml's encoder too."""
    found = []
    for recipe in RECIPES:
        found.append(Variant(recipe, "native", False))
        if recipe != "MXFP4":
            found.append(Variant(recipe, "native", True))
        if recipe in PAIRED:
            found += [Variant(recipe, "ggml", False), Variant(recipe, "ggml", True)]
    return found


def split_text(text: str) -> tuple[str, str]:
    """Calibration and test text, cut between paragraphs."""
    cut = text.index("\n\n", int(len(text) * CALIBRATION_SHARE))
    return text[:cut], text[cut:]


def make_files(work: Path, checkpoint: Path, context: int) -> dict[Variant, Path]:
    """Converts what is not there yet."""
    calibration, test = split_text((checkpoint / "heldout.txt").read_text())
    (work / "calibration.txt").write_text(calibration)
    (work / "test.txt").write_text(test)
    matrix = work / "imatrix.gguf"
    if not matrix.exists():
        result = imatrix(checkpoint, text=work / "calibration.txt", outfile=matrix, context=context)
        print(f"imatrix over {result.tokens:,} tokens: {result.seconds:.0f} s", flush=True)
    files = {}
    for variant in variants():
        files[variant] = work / f"{variant.name}.gguf"
        if not files[variant].exists():
            convert(
                checkpoint,
                quant=variant.recipe,
                encoder=variant.encoder,
                imatrix=matrix if variant.weighed else None,
                outfile=files[variant],
            )
    return files


def measure(base: OpenModel, files: dict[Variant, Path], tokens: TokenSet, work: Path) -> list[Measured]:
    """Compares all files with the checkpoint, some of them side by side in one run; results in ``work`` are reused."""
    measured = {}
    for variant, path in files.items():
        model = open_model(path)
        sizes = inspect(path).sizes.total
        measured[variant] = Measured(variant, sizes.bits, Comparison(tokens, base.identity, model.identity), model)
    kept = {one.variant: work / f"{one.variant.name}-{tokens.digest[:12]}.npz" for one in measured.values()}
    todo = []
    for variant, one in measured.items():
        if kept[variant].exists():
            with np.load(kept[variant]) as arrays:
                one.comparison.restore(dict(arrays))
        else:
            todo.append(one)
    settings = StreamSettings(options=preset("official"))
    for begin in range(0, len(todo), AT_ONCE):
        group = todo[begin : begin + AT_ONCE]
        started = time.monotonic()
        fan = Fan([one.comparison for one in group])
        run_stream([base, *(one.model for one in group)], tokens, fan, settings)
        names = ", ".join(one.variant.name for one in group)
        print(f"{names}, {tokens.tokens:,} tokens: {time.monotonic() - started:.0f} s", flush=True)
        for one in group:
            np.savez(kept[one.variant], **one.comparison.snapshot())
    return list(measured.values())


def share(found: Estimate) -> str:
    return f"{100 * found.value:.2f} ± {100 * (found.error or 0):.2f}"


def milli(found: Estimate) -> str:
    return f"{1000 * found.value:.3f} ± {1000 * (found.error or 0):.3f}" if found.value else "0"


def main_table(found: Sequence[Measured]) -> list[str]:
    """All recipes with our encoder."""
    lines = [
        "| recipe | importance | bits per weight | same expert set, % | experts in common, % | KL, 10⁻³ nats |"
        " KL 99 % | same token, % | perplexity ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        if one.variant.encoder != "native":
            continue
        routing, output = one.comparison.routing(), one.comparison.output_result()
        assert routing is not None and output is not None
        cells = (
            one.variant.recipe,
            "matrix" if one.variant.weighed else "none",
            f"{one.bits:.2f}",
            share(routing.exact),
            share(routing.overlap),
            milli(output.kl),
            f"{output.kl_quantiles.p99.value:.3g}",
            share(output.top1_agreement),
            f"{output.perplexity_ratio.value:.4f} ± {output.perplexity_ratio.error or 0:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def difference(one: Measured, other: Measured) -> Estimate:
    """Mean of the per-token difference of KL, one minus other."""
    tokens = one.comparison.tokens
    chunk_of = np.arange(tokens.tokens) // tokens.context
    found = estimate_tokens(one.kl - other.kl, chunk_of, tokens.chunks)
    assert found is not None
    return found


def paired_table(pairs: Sequence[tuple[str, str, Measured, Measured]], first: str, second: str) -> list[str]:
    """Pairs of files over the same tokens: each token is compared with itself."""
    lines = [
        f"| recipe | importance | KL {first}, 10⁻³ nats | KL {second} | difference | in standard errors |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for recipe, importance, one, other in pairs:
        delta = difference(one, other)
        kls = [output.kl for output in (m.comparison.output_result() for m in (one, other)) if output is not None]
        ratio = delta.value / delta.error if delta.error else 0.0
        cells = (recipe, importance, milli(kls[0]), milli(kls[1]), milli(delta), f"{ratio:+.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def encoder_pairs(found: Sequence[Measured], *, weighed: bool) -> list[tuple[str, str, Measured, Measured]]:
    by = {one.variant: one for one in found}
    note = "matrix" if weighed else "none"
    return [
        (recipe, note, by[Variant(recipe, "native", weighed)], by[Variant(recipe, "ggml", weighed)])
        for recipe in PAIRED
    ]


def importance_pairs(found: Sequence[Measured]) -> list[tuple[str, str, Measured, Measured]]:
    by = {one.variant: one for one in found}
    return [
        (recipe, encoder, by[Variant(recipe, encoder, True)], by[Variant(recipe, encoder, False)])
        for recipe in RECIPES[1:]
        for encoder in ("native", "ggml")
        if Variant(recipe, encoder, True) in by
    ]


def verdict(pairs: Sequence[tuple[str, str, Measured, Measured]], lower: str) -> str:
    """How many of the pairs come out lower, counted, not claimed."""
    deltas = [difference(one, other) for _, _, one, other in pairs]
    better = sum(d.value < 0 for d in deltas)
    clear = sum(d.value < -2 * (d.error or 0) for d in deltas)
    return f"{lower} is lower in {better} of {len(pairs)} rows, by more than two standard errors in {clear}."


DOCUMENT = """# Quality: what each type costs

Measured on the tiny model that ships with the package (`kimi_gguf/data/tiny-k31`: Kimi K3.1 in every part, trained on
public-domain novels; {parameters}), by the stream engine in float32, over {tokens:,} tokens of held-out text
in {chunks} chunks of {context}. The baseline is the checkpoint itself. Importance matrices come from {calibration}
other tokens. ± is one standard error, from the spread of chunks. They are figures of this
model; what they show for others is how to measure your own files.

## Recipes

Encoder `native`. KL is KL(checkpoint ‖ file) of the next-token distribution; "same expert set" is the share of tokens
whose whole set of experts is the same, over all MoE layers.

{main}

MXFP4 moves bits and changes nothing: the same experts for every token, and a KL divergence of exactly 0. Perplexity
does not order the rows, KL divergence and routing do.

## Our encoder against ggml's

The same recipe, encoded twice; differences are taken token by token, so that the text's own spread cancels. Rows
without importance are over {paired_tokens:,} tokens, those with over {tokens:,}.

{encoders}

{encoder_verdict}

## With and without an importance matrix

{importance}

{importance_verdict}

## Commands

One row:

```
kimi-gguf imatrix kimi_gguf/data/tiny-k31 --text calibration.txt --context {context} -o imatrix.gguf
kimi-gguf convert kimi_gguf/data/tiny-k31 --quant Q3_K_M --encoder native --imatrix imatrix.gguf --outfile Q3_K_M.gguf
kimi-gguf eval Q3_K_M.gguf --baseline kimi_gguf/data/tiny-k31 --text test.txt --context {context} --tokens {tokens}
```

All of them, and this page (it also makes the two texts):

```
python scripts/quality_table.py --work DIR --tokens {tokens} --paired-tokens {paired_tokens}
```

Text SHA-256 `{text_sha}`; checkpoint `{digest}`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for texts, matrix and GGUF files")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "quality.md")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--paired-tokens", type=int, default=16384, help="for the comparison of the two encoders")
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    files = make_files(options.work, options.checkpoint, options.context)
    base = open_model(options.checkpoint)
    vocab = base.store.config.vocab_size
    test, more, calibration = (
        read_tokens(options.work / f"{name}.txt", base.vocabulary, vocab, context=options.context, tokens=limit)
        for name, limit in (("test", options.tokens), ("test", options.paired_tokens), ("calibration", None))
    )
    paired = {v: path for v, path in files.items() if v.recipe in PAIRED and not v.weighed}
    longer = measure(base, paired, more, options.work)
    found = measure(base, files, test, options.work)
    for one in found:
        routing, output = one.comparison.routing(), one.comparison.output_result()
        if one.variant.recipe == "MXFP4" and (
            routing is None or routing.exact.value < 1 or output is None or output.kl.value
        ):
            sys.exit("MXFP4 is not lossless")
    encoders = [*encoder_pairs(longer, weighed=False), *encoder_pairs(found, weighed=True)]
    importance = importance_pairs(found)
    text = DOCUMENT.format(
        parameters=parameters(options.checkpoint),
        tokens=test.tokens,
        paired_tokens=more.tokens,
        chunks=test.chunks,
        context=test.context,
        calibration=f"{calibration.tokens:,}",
        main="\n".join(main_table(found)),
        encoders="\n".join(paired_table(encoders, "native", "ggml")),
        encoder_verdict=verdict(encoders, "The KL divergence of `native`"),
        importance="\n".join(paired_table(importance, "with", "without")).replace("importance", "encoder", 1),
        importance_verdict=verdict(importance, "The KL divergence with a matrix"),
        text_sha=test.text_sha256,
        digest=base.identity.digest,
    )
    options.out.write_text(text)
    print(text)


def parameters(checkpoint: Path) -> str:
    config = json.loads((checkpoint / "config.json").read_text()).get("text_config", {})
    return (
        f"{config['num_hidden_layers']} layers, {config['num_experts']} experts, {config['num_experts_per_token']} used"
    )


if __name__ == "__main__":
    main()
