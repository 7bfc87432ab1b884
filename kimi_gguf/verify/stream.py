"""The stream engine: the float32 reference over a whole text, one layer at a time, of one model or two side by side.

A layer of each model is loaded once, moves the hidden states of all tokens, is compared, and dropped; so the largest
model needs the memory of one layer and the time to read it once. A run whose states are on disk is journalled by
layer and can be continued.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from kimi_gguf.reference.options import Options
from kimi_gguf.verify.listeners import Listener
from kimi_gguf.verify.models import OpenModel
from kimi_gguf.verify.observations import (
    FullLogits,
    NoProgress,
    Place,
    Progress,
    TokenSet,
)
from kimi_gguf.verify.stream_blocks import Tap
from kimi_gguf.verify.stream_hidden import Hidden, Seen
from kimi_gguf.verify.stream_lane import Lane
from kimi_gguf.verify.stream_plan import MemoryPlan, forecast, plan_memory
from kimi_gguf.verify.stream_state import Rows, StateFolder
from quant.errors import UsageError

Array = npt.NDArray[Any]
DEFAULT_SCRATCH = ".kimi-gguf-run"
_OBSERVED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a run is done.

    Attributes:
        memory: bytes that the process may take.
        device: a torch device, ``cpu`` or ``cuda``.
        scratch: folder for hidden states; None decides by size, in the current folder when they do not fit.
        resume: continue an interrupted run of the same models, text and settings.
        options: conventions of the reference.
        teacher_forced: every layer of the second model gets the hidden states of the first.
        observe: tell the listener about layers and outputs; an importance matrix needs neither.
        note: is told the forecast.
    """

    memory: int = 20 * 10**9
    device: str = "cpu"
    scratch: Path | None = None
    resume: bool = False
    options: Options = field(default_factory=Options)
    teacher_forced: bool = False
    observe: bool = True
    progress: Progress = field(default_factory=NoProgress)
    note: Callable[[str], None] = lambda text: None


def run_stream(
    models: Sequence[OpenModel],
    tokens: TokenSet,
    listener: Listener,
    settings: StreamSettings,
    *,
    tap: Tap | None = None,
    conclude: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run ``models`` over ``tokens`` and tell ``listener`` all that is seen.

    Args:
        tap: sees the inputs of the only model's weights.
        conclude: stores the result; what the run can be continued from goes only after it.

    Returns:
        settings worth keeping in a report: device, memory, forecast.

    Raises:
        UsageError: the memory is too small, or there is no such device.
        OutputError: the scratch disk is too small.
        InputError: a model is damaged, or ``resume`` finds another run.
    """
    device = open_device(settings.device)
    plan = plan_memory(
        models[0].store.config,
        tokens,
        settings.memory,
        lanes=len(models),
        on_disk=settings.scratch is not None or settings.resume,
    )
    expected = forecast([model.store for model in models], tokens, plan, device)
    settings.note(expected.sentence())
    folder = _open_folder(models, tokens, plan, settings, tap is not None)
    try:
        lanes = [
            Lane(f"m{i}", model.store, tokens, folder, plan, settings.options, device, tap)
            for i, model in enumerate(models)
        ]
        listener.attach(folder.folder)
        _Driver(lanes, tokens, listener, settings, folder, plan).run()
        listener.finish()
        conclude()
        folder.remove()
    finally:
        folder.close()
    if settings.scratch is None and folder.folder is not None:
        with suppress(OSError):
            folder.folder.parent.rmdir()
    return {
        "device": settings.device,
        "memory": settings.memory,
        "options": asdict(settings.options),
        "forecast": expected.to_dict(),
    }


def open_device(name: str) -> torch.device:
    """The torch device called ``name``.

    Raises:
        UsageError: torch does not know it, or cannot use it here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}", "use --device cpu") from None
    return device


def _open_folder(
    models: Sequence[OpenModel], tokens: TokenSet, plan: MemoryPlan, settings: StreamSettings, tapped: bool
) -> StateFolder:
    if plan.state_in_memory:
        return StateFolder(None, "", resume=False, needed=0)
    what = {
        "models": [[model.identity.digest, model.stamp] for model in models],
        "tokens": tokens.digest,
        "options": asdict(settings.options),
        "teacher_forced": settings.teacher_forced,
        "device": settings.device,
        "tapped": tapped,
        "observed": settings.observe,
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    parent = settings.scratch or Path(DEFAULT_SCRATCH)
    return StateFolder(parent / key[:16], key, resume=settings.resume, needed=plan.state_bytes)


@dataclass(slots=True)
class _Driver:
    """The loop over layers."""

    lanes: Sequence[Lane]
    tokens: TokenSet
    listener: Listener
    settings: StreamSettings
    folder: StateFolder
    plan: MemoryPlan

    def run(self) -> None:
        layers = self.lanes[0].config.n_layers
        start = self._start()
        progress = self.settings.progress
        progress.begin("layers", layers + 1)
        for layer in range(start, layers):
            progress.step(layer, f"layer {layer}")
            self._layer(layer)
        progress.step(layers, "output")
        self._output()
        progress.step(layers + 1, "done")

    def _start(self) -> int:
        journal = self.folder.journal
        if not journal:
            for lane in self._moving():
                lane.embed()
            return 0
        self.listener.restore(self.folder.arrays)
        for lane, names in zip(self._moving(), journal["lanes"], strict=True):
            lane.resume(names)
        for lane, name in zip(self.lanes, journal["selections"], strict=True):
            lane.resume_selection(name)
        layer = int(journal["layer"])
        self.settings.note(f"continuing after layer {layer}")
        return layer + 1

    def _moving(self) -> Sequence[Lane]:
        """The lanes that have hidden states of their own."""
        return self.lanes[:1] if self.settings.teacher_forced else self.lanes

    def _layer(self, layer: int) -> None:
        given = self.lanes[0].hidden if self.settings.teacher_forced else None
        results = [lane.run_layer(layer, given) for lane in self.lanes]
        if self.settings.observe:
            for place in self._places():
                seen = [lane.observe(place, s, h) for lane, (h, s) in zip(self.lanes, results, strict=True)]
                self.listener.layer(place, layer, seen)
        self.listener.layer_done(layer)
        stale: list[Rows] = []
        for lane, (after, seen_) in zip(self.lanes, results, strict=True):
            stale += self._settle(lane, after, seen_)
        journal = {
            "layer": layer,
            "lanes": [lane.names for lane in self._moving()],
            "selections": [lane.selection_name for lane in self.lanes],
        }
        self.folder.commit(journal, self.listener.snapshot())
        for rows in stale:
            rows.drop()

    def _settle(self, lane: Lane, after: Hidden, seen: Seen) -> list[Rows]:
        """Keep what the next layer reads; returns what can go once that is journalled."""
        chosen, seen.selection = seen.selection, None
        seen.drop()
        if lane in self._moving():
            return lane.accept(after, chosen)
        # Its hidden states served to be looked at; a selection may be shared with later layers.
        stale = [after.residual]
        if chosen is not None:
            stale += [] if lane.selection is None else [lane.selection]
            lane.selection = chosen
        return stale

    def _places(self) -> Iterator[Place]:
        for whole in self.tokens.places():
            for begin in range(0, whole.end, _OBSERVED_TOKENS):
                yield Place(whole.chunk, begin, min(begin + _OBSERVED_TOKENS, whole.end))

    def _output(self) -> None:
        given = self.lanes[0].hidden if self.settings.teacher_forced else None
        context = self.tokens.context
        for begin in range(0, self.tokens.tokens, self.plan.output_tokens):
            end = min(begin + self.plan.output_tokens, self.tokens.tokens)
            if not self.settings.observe:
                for lane in self.lanes:
                    lane.final_states(begin, end, given)
                continue
            logits = [lane.logits(begin, end, given) for lane in self.lanes]
            for chunk in range(begin // context, (end - 1) // context + 1):
                low, high = max(begin, chunk * context), min(end, (chunk + 1) * context)
                place = Place(chunk, low - chunk * context, high - chunk * context)
                scored = len(self.tokens.targets(place))
                if scored:
                    rows = slice(low - begin, low - begin + scored)
                    self.listener.output(place, [FullLogits(one.values[rows]) for one in logits])
