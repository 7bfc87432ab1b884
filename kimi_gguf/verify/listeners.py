"""Who listens to a run of one model or several: comparisons, recordings, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.observations import FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.trace import TraceReader, TraceWriter, WithTrace

Array = npt.NDArray[Any]


class Listener(Protocol):
    """Takes what a run sees, models in the order in which they were given, and survives an interruption."""

    def attach(self, folder: Path | None) -> None:
        """The run begins, or continues; ``folder`` outlives an interruption, None when nothing does."""
        ...

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None: ...

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None: ...

    def layer_done(self, layer: int) -> None:
        """All places of a layer were told; what must survive has to be on disk, or in ``snapshot``, after this."""
        ...

    def snapshot(self) -> Mapping[str, Array]:
        """What ``restore`` needs to go on from here."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None: ...

    def finish(self) -> None:
        """The run is over; the folder is about to go."""
        ...


class Quiet:
    """A listener that keeps nothing; to be derived from."""

    def attach(self, folder: Path | None) -> None: ...

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None: ...

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None: ...

    def layer_done(self, layer: int) -> None: ...

    def snapshot(self) -> Mapping[str, Array]:
        return {}

    def restore(self, state: Mapping[str, Array]) -> None: ...

    def finish(self) -> None: ...


class Compare(Quiet):
    """Tells a ``Comparison`` about a baseline and a model that run side by side.

    Args:
        conclude: what takes long and may be interrupted, done while the run can still be continued.
    """

    def __init__(self, comparison: Comparison, conclude: Callable[[], None] = lambda: None) -> None:
        self._comparison = comparison
        self._conclude = conclude

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None:
        self._comparison.layer(place, layer, *seen)

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None:
        self._comparison.output(place, *logits)

    def snapshot(self) -> Mapping[str, Array]:
        return self._comparison.snapshot()

    def restore(self, state: Mapping[str, Array]) -> None:
        self._comparison.restore(state)

    def finish(self) -> None:
        self._conclude()


class CompareWithTrace(Compare):
    """Tells a ``Comparison`` about a model that runs, and a baseline that was recorded."""

    def __init__(
        self,
        comparison: Comparison,
        trace: TraceReader,
        tokens: TokenSet,
        conclude: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(comparison, conclude)
        self._sink = WithTrace(trace, tokens, comparison)

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None:
        self._sink.layer(place, layer, seen[0])

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None:
        self._sink.output(place, logits[0])


class Record(Quiet):
    """Tells a ``TraceWriter`` about the only model."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None:
        self._writer.layer(place, layer, seen[0])

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None:
        self._writer.output(place, logits[0])

    def snapshot(self) -> Mapping[str, Array]:
        return self._writer.snapshot()

    def restore(self, state: Mapping[str, Array]) -> None:
        self._writer.restore(state)

    def finish(self) -> None:
        self._writer.finish()
