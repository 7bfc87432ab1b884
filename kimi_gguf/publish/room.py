"""Disk of a conversion whose output leaves as it is made: shards and unpublished output under one limit.

Room is taken where it can be waited for: before a shard is acquired, for the shard and for all output that its units
make. It is given back when the shard is released, and when an output file has been published and removed. Files
complete in the order of the shards, so what must fit at once is small, and known beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from convert.disk import allocated_bytes, free_bytes
from convert.domain import Plan, Source
from convert.output import PARTIAL
from convert.transforms import row_count, source_names
from convert.units import UnitTable
from kimi_gguf.hub.budget import DiskBudget, walk_shards
from kimi_gguf.hub.proxy import SourceProxy
from kimi_gguf.hub.retry import Stopped
from kimi_gguf.hub.source import HubSource, existing
from quant.errors import OutputError


@dataclass(frozen=True, slots=True)
class OutputSteps:
    """Output by the shard that completes its units; -1 stands for units that need no shard.

    Attributes:
        made: bytes of tensor data that the units of a shard write.
        file_parts: the same by file.
    """

    made: Mapping[int, int]
    file_parts: Mapping[int, Mapping[int, int]]


def output_steps(plan: Plan, source: Source, units: UnitTable, pending: Sequence[int]) -> OutputSteps:
    """What the units ``pending`` write, by the shard with which they can be done."""
    made: Counter[int] = Counter()
    parts: dict[int, Counter[int]] = {}
    for number in pending:
        unit = units.unit(number)
        tensor = plan.tensors[unit.tensor]
        shards = (source.tensors[name].shard for name in source_names(tensor.spec, unit.row_begin, unit.row_end))
        last = max(shards, default=-1)
        nbytes = tensor.nbytes * (unit.row_end - unit.row_begin) // row_count(tensor.spec)
        made[last] += nbytes
        parts.setdefault(last, Counter())[tensor.file] += nbytes
    return OutputSteps(made, parts)


def frame_bytes(plan: Plan, index: int) -> int:
    """Bytes of a file that are no tensor data: header and padding."""
    return plan.files[index].nbytes - sum(t.nbytes for t in plan.tensors if t.file == index)


@dataclass(frozen=True, slots=True)
class RoomNeed:
    """Bytes on disk at the worst moment, when every finished file is published at once: all, and of output alone."""

    total: int
    output: int


def room_need(plan: Plan, source: Source, *, shards_take_room: bool, present: Collection[int] = ()) -> RoomNeed:
    """The least room in which a conversion can go on.

    Args:
        shards_take_room: false for a checkpoint that is on disk anyway.
        present: shards that are there anyway.
    """
    units = UnitTable([tensor.spec for tensor in plan.tensors])
    steps = output_steps(plan, source, units, range(len(units)))
    left = Counter(
        {index: sum(parts.get(index, 0) for parts in steps.file_parts.values()) for index in range(len(plan.files))}
    )
    held = sum(frame_bytes(plan, index) for index in range(len(plan.files))) + steps.made.get(-1, 0)
    left.subtract(steps.file_parts.get(-1, {}))
    total, output = held, held
    for step in walk_shards(plan, source, present):
        held += steps.made.get(step.shard, 0)
        total = max(total, held + (step.alive if shards_take_room else 0))
        output = max(output, held)
        for index, nbytes in steps.file_parts.get(step.shard, {}).items():
            left[index] -= nbytes
            if not left[index]:
                held -= plan.files[index].nbytes
    return RoomNeed(total, output)


def claim_room(plan: Plan, source: Source, budget: DiskBudget, directory: Path, max_disk: int | None) -> RoomNeed:
    """Compare what a conversion needs with ``--max-disk`` and with what is free, and set the budget's limit from both.

    Args:
        directory: of the output; of shards a source on the Hub knows its own.

    Raises:
        OutputError: too little; names what is needed.
    """
    fetching = source if isinstance(source, HubSource) else None
    present = fetching.present if fetching else ()
    need = room_need(plan, source, shards_take_room=fetching is not None, present=present)
    if fetching and fetching.store.keep:
        kept = fetching.need(plan).total
        need = RoomNeed(need.output + kept, need.output)
    if max_disk is not None and max_disk < need.total:
        raise OutputError(
            f"--max-disk {max_disk:,} is less than the {need.total:,} bytes needed: {need.output:,} for output that is "
            f"not yet published, the rest for shards",
            f"give --max-disk {-(-need.total // 10**9)}G, or a smaller --split-max-size",
        )
    output_at = existing(directory)
    held = [directory / name for file in plan.files for name in (file.name, file.name + PARTIAL)]
    free = free_bytes(output_at) + sum(allocated_bytes(path) for path in held)
    wanted = need.output
    if fetching and existing(fetching.store.directory).stat().st_dev == output_at.stat().st_dev:
        free += fetching.shards_on_disk()
        wanted = need.total
    if wanted > free:
        raise OutputError(f"{output_at} has room for {max(free, 0):,} bytes; {wanted:,} are needed", "free some space")
    limits = [n for n in (max_disk, free if wanted == need.total else None) if n is not None]
    budget.limit = min(limits, default=None)
    return need


class RoomySource(SourceProxy):
    """A source whose shards are acquired when there is room for what is made from them; else as ``inner``.

    Attributes:
        budget: shared with ``inner`` where that fetches shards.
        made: bytes of output that each shard's units write, set when work begins.
    """

    def __init__(self, inner: Source, budget: DiskBudget, stop: Event) -> None:
        super().__init__(inner)
        self.budget = budget
        self.made: Mapping[int, int] = {}
        self._stop = stop
        self._taken: set[int] = set()

    def acquire(self, shard: int) -> None:
        """Wait for room for the shard's output, then for the shard.

        Raises:
            Stopped: publishing has failed.
        """
        if self._stop.is_set():
            raise Stopped
        if shard not in self._taken:
            self.budget.take(self.made.get(shard, 0))
            self._taken.add(shard)
        super().acquire(shard)
