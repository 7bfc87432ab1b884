"""Sums of squared inputs of every weight matrix: collected while a model runs, merged, and made safe for experts that
hardly any token reached.

The sums are those of llama.cpp's llama-imatrix: per column over all tokens, per expert over the tokens that reached
it, and for ``attn_k_b`` and ``attn_v_b`` (one matrix per head) in one flat row with one count, the number of tokens.

The prior: an expert that fewer than ``hits`` tokens reached is filled up to that many with the mean square of the
whole stack's inputs, column by column. An expert that was never reached then weighs columns as the layer does on
average, and one reached twice is not ruled by those two tokens; others keep their sums as they are. How often each
expert was really reached is stored beside the sums, so that files can be merged without counting a prior twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from convert.disk import disk_faults
from kimi_gguf.verify.listeners import Quiet
from quant.errors import InputError
from quant.gguf_parser import parse_gguf
from quant.imatrix_file import read_index

F64Array = npt.NDArray[np.float64]

DEFAULT_PRIOR = 16
COVERAGE_KEY = "kimi_gguf.imatrix.coverage"
PRIOR_KEY = "kimi_gguf.imatrix.prior_hits"
HITS_KEY = "kimi_gguf.imatrix.hits."
_EXPERTS = ".ffn_gate_exps.weight"
_DOWN = ".ffn_down_exps.weight"
_LAYER_FILE = "importance."


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one weight matrix: squares F64 [slices, columns] and counts F64 [slices]."""

    squares: F64Array
    counts: F64Array


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """How often the experts of one layer were reached: least, 1 %, median, and experts never reached."""

    layer: int
    least: int
    percent1: float
    median: float
    unseen: int


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """How often experts were reached.

    Attributes:
        experts: of all layers together; unseen: never reached; rare: reached less often than the prior's hits.
        least, percent1, median: hits per expert over all layers.
        layers: one by one.
    """

    experts: int
    unseen: int
    rare: int
    prior: int
    least: int
    percent1: float
    median: float
    layers: tuple[LayerCoverage, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Collector(Quiet):
    """A tap and a listener: adds up squares, layer by layer.

    Sums of finished layers lie in the run's folder when there is one, so that they survive an interruption.

    Args:
        experts: routed experts per layer.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._sums: dict[str, Sums] = {}
        self._folder: Path | None = None

    def attach(self, folder: Path | None) -> None:
        self._folder = folder

    def rows(self, name: str, rows: Tensor, expert: int | None = None) -> None:
        """Add the squares of input rows [..., in]."""
        flat = rows.reshape(-1, rows.shape[-1])
        self._add(name, flat.square().sum(0), len(flat), expert)

    def squares(self, name: str, sums: Tensor, count: int) -> None:
        """Add squares [in] that are summed over ``count`` rows already."""
        self._add(name, sums, count, None)

    def _add(self, name: str, sums: Tensor, count: int, expert: int | None) -> None:
        found = self._sums.get(name)
        if found is None:
            slices = 1 if expert is None else self._experts
            found = self._sums[name] = Sums(np.zeros((slices, len(sums))), np.zeros(slices))
        found.squares[expert or 0] += sums.double().cpu().numpy()
        found.counts[expert or 0] += count

    def layer_done(self, layer: int) -> None:
        if self._folder is not None:
            self._save(self._folder / f"{_LAYER_FILE}{layer}.npz")
            self._sums = {}

    def finish(self) -> None:
        if self._folder is not None:
            for path in sorted(self._folder.glob(f"{_LAYER_FILE}*.npz")):
                self._sums |= _load(path)

    def collected(self) -> dict[str, Sums]:
        """All sums, by GGUF name.

        Raises:
            InputError: a sum that is not finite.
        """
        for name, sums in self._sums.items():
            if not np.isfinite(sums.squares).all():
                raise InputError(f"{name}: its inputs are not finite", "verify the model; it cannot run")
        return self._sums

    def _save(self, path: Path) -> None:
        arrays = {f"{kind}:{name}": getattr(sums, kind) for name, sums in self._sums.items() for kind in _KINDS}
        partial = path.with_suffix(".partial")
        with disk_faults(path):
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            partial.replace(path)


_KINDS = ("squares", "counts")


def _load(path: Path) -> dict[str, Sums]:
    with np.load(path, allow_pickle=False) as saved:
        names = [key.removeprefix("counts:") for key in saved.files if key.startswith("counts:")]
        return {name: Sums(saved[f"squares:{name}"], saved[f"counts:{name}"]) for name in names}


def read_sums(path: Path) -> tuple[dict[str, Sums], tuple[str, ...], int, int]:
    """What an importance matrix file was made from, without the prior: sums, data sets, chunks, tokens per chunk.

    Raises:
        InputError: not an importance matrix.
    """
    index = read_index(path)
    prior, hits = _stored_hits(path) if not index.legacy else (0, {})
    sums: dict[str, Sums] = {}
    with path.open("rb") as file:
        for name, entry in index.entries.items():
            file.seek(entry.offset)
            squares = np.frombuffer(file.read(4 * entry.size), dtype="<f4").astype(np.float64)
            found = Sums(squares.reshape(len(entry.counts), -1), entry.counts.astype(np.float64))
            if prior and (real := hits.get(_layer_of(name))) is not None and "_exps." in name:
                found = without_prior(found, np.asarray(real, dtype=np.float64))
            sums[name] = found
    return sums, index.datasets, index.chunk_count, index.chunk_size


def _stored_hits(path: Path) -> tuple[int, dict[str, npt.NDArray[Any]]]:
    metadata = parse_gguf(path).metadata
    prior = metadata.get(PRIOR_KEY)
    if prior is None or not isinstance(prior.value, np.ndarray) or not len(prior.value):
        return 0, {}
    stored = {key.removeprefix(HITS_KEY): v.value for key, v in metadata.items() if key.startswith(HITS_KEY)}
    return int(prior.value[0]), {key: value for key, value in stored.items() if isinstance(value, np.ndarray)}


def _layer_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("blk.") else ""


def merge(into: dict[str, Sums], other: Mapping[str, Sums], file: str) -> None:
    """Add the sums of another run over the same model.

    Raises:
        InputError: a matrix of another size.
    """
    for name, theirs in other.items():
        mine = into.get(name)
        if mine is None:
            raise InputError(f"{file}: this model has no {name}", "merge importance matrices of one model only")
        if mine.squares.size != theirs.squares.size:
            raise InputError(
                f"{file}: {name} has {theirs.squares.size} values, this model has {mine.squares.size}",
                "merge importance matrices of one model only",
            )
        elif mine.squares.shape == theirs.squares.shape:
            into[name] = Sums(mine.squares + theirs.squares, mine.counts + theirs.counts)
        else:
            # A legacy file has one count for a whole stack; it then stands for each of its matrices.
            one, many = sorted((mine, theirs), key=lambda sums: len(sums.counts))
            squares = many.squares + one.squares.reshape(many.squares.shape)
            into[name] = Sums(squares, many.counts + one.counts[0])


def with_prior(sums: Sums, hits: int) -> Sums:
    """Fill experts reached by fewer than ``hits`` tokens up to that many with the stack's mean input."""
    lacking = np.maximum(hits - sums.counts, 0)
    total = sums.counts.sum()
    if len(sums.counts) == 1 or total == 0:
        return sums
    mean = sums.squares.sum(axis=0) / total
    return Sums(sums.squares + lacking[:, None] * mean, sums.counts + lacking)


def without_prior(sums: Sums, hits: F64Array) -> Sums:
    """The inverse of ``with_prior``, given how often each expert was really reached, F64 [experts]."""
    total = hits.sum()
    lacking = sums.counts - hits
    if total == 0 or len(hits) != len(sums.counts):
        return sums
    # The filled sums are the real ones times 1 + (what was filled in) / (what was there), column by column.
    mean = sums.squares.sum(axis=0) / (total + lacking.sum())
    return Sums(np.maximum(sums.squares - lacking[:, None] * mean, 0.0), hits)


def coverage(sums: Mapping[str, Sums], prior: int) -> ExpertCoverage | None:
    """How often experts were reached; None for a model without routed experts."""
    by_layer = {int(_layer_of(n)): s.counts for n, s in sums.items() if n.endswith(_EXPERTS) and len(s.counts) > 1}
    if not by_layer:
        return None
    every = np.concatenate(list(by_layer.values()))
    layers = tuple(
        LayerCoverage(
            layer=layer,
            least=int(counts.min()),
            percent1=float(np.quantile(counts, 0.01)),
            median=float(np.median(counts)),
            unseen=int((counts == 0).sum()),
        )
        for layer, counts in sorted(by_layer.items())
    )
    return ExpertCoverage(
        experts=len(every),
        unseen=int((every == 0).sum()),
        rare=int((every < prior).sum()),
        prior=prior,
        least=int(every.min()),
        percent1=float(np.quantile(every, 0.01)),
        median=float(np.median(every)),
        layers=layers,
    )


def notes(sums: Mapping[str, Sums], found: ExpertCoverage | None, prior: int) -> dict[str, str | Sequence[int]]:
    """The keys that are stored beside the sums: coverage, the prior, and how often each expert was reached."""
    if found is None:
        return {}
    kept: dict[str, str | Sequence[int]] = {COVERAGE_KEY: json.dumps(found.to_dict()), PRIOR_KEY: [prior]}
    for name, one in sums.items():
        if name.endswith(_DOWN) and len(one.counts) > 1:
            kept[HITS_KEY + _layer_of(name)] = [int(count) for count in one.counts]
    return kept


def entries(sums: Mapping[str, Sums], prior: int) -> dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Sums with the prior, as ``quant.imatrix`` saves them."""
    filled: Iterable[tuple[str, Sums]] = ((name, with_prior(one, prior)) for name, one in sums.items())
    return {name: (one.squares.astype(np.float32), one.counts.astype(np.float32)) for name, one in filled}


def worst_layers(found: ExpertCoverage, count: int = 5) -> Iterator[LayerCoverage]:
    """The layers with most unseen experts, then with least median hits."""
    return iter(sorted(found.layers, key=lambda layer: (-layer.unseen, layer.median))[:count])
