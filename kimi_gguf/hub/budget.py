"""How many bytes a conversion may have on disk, and how many it needs.

A shard is on disk from the moment that its download begins until nothing needs it any more. The next one is fetched
while the present one is converted, when there is room for both; else it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from threading import Condition, Event

from convert.domain import Plan, Source
from convert.transforms import row_count, source_names
from convert.units import UnitTable
from kimi_gguf.hub.retry import Stopped

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ShardNeed:
    """Bytes of shards that are on disk at once, at the worst moment.

    Attributes:
        least: one shard after the other.
        ahead: each fetched while the one before is in work.
        total: of all shards that are fetched at all.
    """

    least: int
    ahead: int
    total: int


def shard_need(plan: Plan, source: Source, present: Collection[int] = ()) -> ShardNeed:
    """What the shards of a plan need when they are walked in order.

    Args:
        present: shards that are on disk anyway and stay there.
    """
    walk = list(walk_shards(plan, source, present))
    total = sum(step.size for step in walk)
    return ShardNeed(max((s.alive for s in walk), default=0), max((s.ahead for s in walk), default=0), total)


@dataclass(frozen=True, slots=True)
class ShardStep:
    """A shard on its way through a conversion.

    Attributes:
        size: bytes that it takes; 0 when it is on disk anyway.
        alive: bytes of shards on disk while it is in work; ahead: when it was fetched before its turn.
    """

    shard: int
    size: int
    alive: int
    ahead: int


def walk_shards(plan: Plan, source: Source, present: Collection[int] = ()) -> Iterator[ShardStep]:
    """The shards that a plan reads, in order, with what is on disk at each."""
    until = _last_use(plan, source)
    alive = 0
    expiring: Counter[int] = Counter()
    before: int | None = None
    for shard in sorted(until):
        size = 0 if shard in present else source.shards[shard].nbytes
        ahead = alive + size
        if before is not None:
            alive -= expiring.pop(before, 0)
        alive += size
        yield ShardStep(shard, size, alive, ahead)
        expiring[until[shard]] += size
        before = shard


def _last_use(plan: Plan, source: Source) -> dict[int, int]:
    """For each shard that is read, the last shard with which it is needed together."""
    until: dict[int, int] = {}
    units = UnitTable([tensor.spec for tensor in plan.tensors])
    for index, tensor in enumerate(plan.tensors):
        spec = tensor.spec
        whole = {source.tensors[name].shard for name in source_names(spec, 0, row_count(spec))}
        groups = [whole]
        if len(whole) > 1:
            cuts = map(units.unit, units.of_tensor(index))
            groups = [{source.tensors[n].shard for n in source_names(spec, c.row_begin, c.row_end)} for c in cuts]
        for group in groups:
            for shard in group:
                until[shard] = max(until.get(shard, 0), *group) if len(group) > 1 else max(until.get(shard, 0), shard)
    return until


class DiskBudget:
    """Bytes that may be taken at once; may be used from several threads.

    Attributes:
        limit: None for no limit.
        used: bytes taken and not given back.
    """

    def __init__(self, stop: Event) -> None:
        self.limit: int | None = None
        self.used = 0
        self._stop = stop
        self._change = Condition()

    def take(self, nbytes: int) -> None:
        """Wait until there is room for so many bytes, and take it.

        Raises:
            Stopped: called off while waiting.
        """
        with self._change:
            while self.limit is not None and self.used and self.used + nbytes > self.limit:
                if self._stop.is_set():
                    raise Stopped
                self._change.wait(_POLL_SECONDS)
            self.used += nbytes

    def add(self, nbytes: int) -> None:
        """Count bytes that are on disk already."""
        with self._change:
            self.used += nbytes

    def give(self, nbytes: int) -> None:
        """Give back bytes that are no longer on disk."""
        with self._change:
            self.used -= nbytes
            self._change.notify_all()
