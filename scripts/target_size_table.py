"""Measures what `--target-size` is worth against the recipes, and prints the tables of docs/convert.md.

    python scripts/target_size_table.py --work DIR [--tokens 2048] [--part matrices|release|tiny]

``tiny``: KL divergence of the tiny model that ships with the package, at the size of each recipe, as the recipe and as
chosen. ``release``: measured sums and chosen types for a checkpoint of the release's shapes. Its headers are written to
DIR (75 MB, and files with holes of 1.56 TB in all); its weights are random: Student's t with 5 degrees of freedom as
MXFP4, Gaussian as BF16. ``matrices``: KL divergence of the tiny model with one kind of tensor as Q3_K and all else
exact. Files in DIR are kept and used again.
"""

from __future__ import annotations

import argparse
import re
import time
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from quality_table import CHECKPOINT, Variant, measure, milli, split_text

from convert import sampled_error
from convert.domain import Plan, SourceTensor, TensorSpec
from convert.plan import Checkpoint, Choices, make_plan, read_checkpoint
from convert.sampled_error import weight_in_sum
from convert.source import LocalSource, open_source
from convert.target_size import candidate_types, within_target
from kimi_gguf import convert
from kimi_gguf.reference.checkpoint_maker import make_sparse_release
from kimi_gguf.verify.models import open_model
from kimi_gguf.verify.result import Estimate
from kimi_gguf.verify.text import read_tokens
from quant import mxfp4
from quant.tensors import TensorClass, U8Array
from quant.types import QuantType

RELEASE_RECIPES = ("Q2_K_XL", "Q2_K", "Q3_K_XL", "Q3_K_M", "MXFP4_MOE", "Q4_K_M")
TINY_RECIPES = ("Q2_K", "Q3_K_M", "Q2_K_XL", "Q3_K_XL", "Q4_K_M", "Q6_K")
SPLIT = 48_000_000_000
CONTEXT = 256
POOL_BLOCKS = 1 << 18
THREADS = 2
EXPERT_TYPES = (QuantType.Q2_K, QuantType.Q3_K, QuantType.MXFP4)
KINDS = {
    TensorClass.ROUTED_EXPERT: "a stack of experts",
    TensorClass.LATENT_PROJECTION: "latent projection",
    TensorClass.SHARED_EXPERT: "shared expert",
    TensorClass.DENSE_FFN: "dense FFN",
    TensorClass.EMBEDDING: "embedding",
    TensorClass.OUTPUT: "output",
}


class RandomWeights(LocalSource):
    """A checkpoint in which every matrix is a stretch of one pool of random weights, from another place for each.

    Codes and scales of a packed matrix begin at the same block of the pool, so they belong together.
    """

    def __init__(self, folder: Path) -> None:
        opened = open_source(folder)
        super().__init__(folder, opened.label, opened.revision, opened.shards, opened.tensors, opened.warnings)
        self._of_shard: defaultdict[int, list[SourceTensor]] = defaultdict(list)
        for tensor in self.tensors.values():
            self._of_shard[tensor.shard].append(tensor)
        rng = np.random.default_rng(0)
        tailed = mxfp4.quantize(rng.standard_t(5, (POOL_BLOCKS // 1024, 1024 * mxfp4.BLOCK)).astype(np.float32))
        plain = rng.standard_normal(POOL_BLOCKS * mxfp4.BLOCK, dtype=np.float32).view(np.uint32)
        # Cut, not rounded: as good a Gaussian, and nothing overflows.
        self._plain = (plain >> 16).astype(np.uint16).view(np.uint8)
        self._codes, self._scales = tailed.packed.reshape(-1), tailed.scales.reshape(-1)

    def read_into(self, shard: int, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with what the tensor at ``offset`` would hold; vectors in F32 stay zero."""
        tensors = self._of_shard[shard]
        tensor = tensors[bisect_right(tensors, offset, key=lambda t: t.begin) - 1]
        view = np.frombuffer(buffer, dtype=np.uint8)
        if tensor.dtype == "F32":
            view[:] = 0
            return
        matrix, _, part = tensor.name.rpartition("_")
        pool = {"packed": self._codes, "scale": self._scales}.get(part, self._plain)
        matrix = tensor.name if pool is self._plain else matrix
        first = zlib.crc32(matrix.encode()) % POOL_BLOCKS * (pool.size // POOL_BLOCKS)
        _copy_round(pool, first + offset - tensor.begin, view)


def _copy_round(pool: U8Array, begin: int, out: U8Array) -> None:
    """Fills ``out`` from a pool that begins again at its end."""
    done = 0
    while done < out.size:
        piece = pool[(begin + done) % pool.size :][: out.size - done]
        out[done : done + piece.size] = piece
        done += piece.size


def release_table(work: Path) -> list[str]:
    """Sums of measured errors of recipes and of what is chosen at their sizes."""
    folder = work / "Kimi-K3.1-Pro"
    if not folder.exists():
        make_sparse_release(folder)
    checkpoint = read_checkpoint(RandomWeights(folder))
    recipes = {name: make_plan(checkpoint, Choices(name, split_max_size=SPLIT)) for name in RELEASE_RECIPES}
    errors = sampled_errors(checkpoint, list(recipes.values()))
    lines = [
        "| at the size of | GB | sum of the recipe | sum of what is chosen | experts chosen, of 276 stacks |",
        "|---|---|---|---|---|",
    ]
    for name, recipe in recipes.items():
        started, busy = time.monotonic(), time.process_time()
        wanted = Choices("MIX", split_max_size=SPLIT, target_size=recipe.nbytes)
        chosen = make_plan(checkpoint, within_target(checkpoint, wanted, None, threads=THREADS))
        seconds, processor = time.monotonic() - started, time.process_time() - busy
        print(f"{name}: {seconds:.0f} s, {processor:.0f} s of processor time", flush=True)
        stacks = Counter(t.qtype for t in chosen.tensors if t.spec.cls is TensorClass.ROUTED_EXPERT)
        experts = ", ".join(f"{stacks[qtype]} {qtype.name}" for qtype in EXPERT_TYPES if stacks[qtype])
        cells = (
            name,
            f"{recipe.nbytes / 1e9:,.0f} GB",
            f"{total(recipe, errors, checkpoint):.3g}",
            f"{total(chosen, errors, checkpoint):.3g}",
            experts + (f", and {less:,.0f} GB less" if (less := (recipe.nbytes - chosen.nbytes) / 1e9) > 1 else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sampled_errors(checkpoint: Checkpoint, recipes: Sequence[Plan]) -> dict[str, dict[QuantType, float]]:
    """Relative squared errors by tensor and type: of all that may be chosen and of all that the recipes take."""
    wanted = {spec: set(types) for spec, types in candidate_types(checkpoint, Choices("")).items()}
    for plan in recipes:
        for tensor in plan.tensors:
            if tensor.spec in wanted:
                wanted[tensor.spec].add(tensor.qtype)
    found = sampled_error.measure(
        checkpoint.source,
        {spec: sorted(types) for spec, types in wanted.items()},
        encoder="native",
        imatrix=None,
        threads=THREADS,
        measured=lambda done, total: None,
    )
    return {spec.name: errors for spec, errors in zip(wanted, found, strict=True)}


def total(plan: Plan, errors: dict[str, dict[QuantType, float]], checkpoint: Checkpoint) -> float:
    """The sum that a choice makes least."""
    return sum(
        weight_in_sum(tensor.spec, checkpoint.config) * errors[tensor.spec.name][tensor.qtype]
        for tensor in plan.tensors
        if tensor.spec.name in errors
    )


def compared(files: dict[str, Path], work: Path, tokens: int) -> dict[str, Estimate]:
    """KL divergence of each file from the tiny checkpoint, over the text that docs/quality.md measures on."""
    text = work / "test.txt"
    text.write_text(split_text((CHECKPOINT / "heldout.txt").read_text())[1])
    base = open_model(CHECKPOINT)
    held_out = read_tokens(text, base.vocabulary, base.store.config.vocab_size, context=CONTEXT, tokens=tokens)
    variants = {Variant(path.stem, "native", False): path for path in files.values()}
    outputs = [one.comparison.output_result() for one in measure(base, variants, held_out, work)]
    return {name: output.kl for name, output in zip(files, outputs, strict=True) if output is not None}


def tiny_table(work: Path, tokens: int) -> list[str]:
    """KL divergence of recipes and of what is chosen at their sizes."""
    files = {}
    for name in TINY_RECIPES:
        recipe, chosen = files[name], files[f"{name}-size"] = work / f"{name}.gguf", work / f"{name}-size.gguf"
        if not recipe.exists():
            convert(CHECKPOINT, quant=name, outfile=recipe)
        if not chosen.exists():
            convert(CHECKPOINT, target_size=recipe.stat().st_size, outfile=chosen)
    found = compared(files, work, tokens)
    lines = ["| at the size of | bytes | the recipe | what is chosen |", "|---|---|---|---|"]
    for name in TINY_RECIPES:
        size = f"{files[name].stat().st_size / 1e6:.1f} MB"
        lines.append(f"| {name} | {size} | {milli(found[name])} | {milli(found[f'{name}-size'])} |")
    return lines


def matrices_table(work: Path, tokens: int) -> list[str]:
    """KL divergence per matrix, with those of one name as Q3_K and the others exact; names of a kind share a row."""
    checkpoint = read_checkpoint(open_source(CHECKPOINT))
    groups: defaultdict[str, list[TensorSpec]] = defaultdict(list)
    for spec, types in candidate_types(checkpoint, Choices("")).items():
        if QuantType.Q3_K in types:
            groups[f"{kind(spec, checkpoint)}, {spec.name.rpartition('.weight')[0].rpartition('.')[2]}"].append(spec)
    files = {name: work / f"{re.sub(r'[^a-z_]+', '-', name.lower())}.gguf" for name in groups}
    for name, path in files.items():
        if not path.exists():
            names = "|".join(re.escape(spec.name) for spec in groups[name])
            convert(CHECKPOINT, quant="MXFP4", tensor_type=[f"^({names})$=Q3_K"], outfile=path)
    divergences: defaultdict[str, list[float]] = defaultdict(list)
    counts: dict[str, float] = {}
    for name, found in compared(files, work, tokens).items():
        first = groups[name][0]
        counts[kind(first, checkpoint)] = weight_in_sum(first, checkpoint.config)
        divergences[kind(first, checkpoint)].append(1000 * found.value / len(groups[name]))
    lines = ["| a matrix of | count | KL divergence |", "|---|---|---|"]
    for name, values in divergences.items():
        low, high = (f"{value:.2g}" for value in (min(values), max(values)))
        lines.append(f"| {name} | {counts[name]:g} | {low if low == high else f'{low} to {high}'} |")
    return lines


def kind(spec: TensorSpec, checkpoint: Checkpoint) -> str:
    """What the tables call tensors that are alike."""
    mixer = "" if spec.layer is None else checkpoint.config.layer_kinds[spec.layer].upper()
    return KINDS.get(spec.cls, mixer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for headers and GGUF files")
    parser.add_argument("--tokens", type=int, default=2048, help="to compare the tiny model over")
    parser.add_argument("--part", choices=("tiny", "release", "matrices"), help="this table alone")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], list[str]]] = {
        "tiny": lambda: tiny_table(options.work, options.tokens),
        "release": lambda: release_table(options.work),
        "matrices": lambda: matrices_table(options.work, options.tokens),
    }
    for name, table in parts.items():
        if options.part in (None, name):
            print("\n".join(["", *table(), ""]), flush=True)


if __name__ == "__main__":
    main()
