"""What shards take on disk, as arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from convert.domain import Plan, Source
from convert.plan import Choices, make_plan, read_checkpoint
from convert.source import open_source
from convert.transforms import source_names
from convert.units import UnitTable
from kimi_gguf.hub.budget import DiskBudget, ShardNeed, shard_need
from kimi_gguf.hub.retry import Stopped
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint


def walked(plan: Plan, source: Source, present: Sequence[int]) -> ShardNeed:
    """The same by walking: at every step, all shards that have come and are still needed."""
    groups = []
    for unit in UnitTable([t.spec for t in plan.tensors]):
        names = source_names(plan.tensors[unit.tensor].spec, unit.row_begin, unit.row_end)
        groups.append({source.tensors[name].shard for name in names})
    order = sorted(set().union(*groups))
    last = {shard: max(max(group) for group in groups if shard in group) for shard in order}
    size = {shard: 0 if shard in present else source.shards[shard].nbytes for shard in order}
    least = ahead = 0
    for before, now in zip([-1, *order], order, strict=False):
        least = max(least, sum(size[s] for s in order if s <= now and last[s] >= now))
        ahead = max(ahead, sum(size[s] for s in order if s <= now and last[s] >= before))
    return ShardNeed(least, ahead, sum(size.values()))


@pytest.mark.parametrize("sharding", ["layer", 400_000, "shuffled"])
@pytest.mark.parametrize("present", [(), (1, 2)])
def test_need_is_that_of_the_walk(tmp_path: Path, sharding: Any, present: tuple[int, ...]) -> None:
    source = open_source(make_checkpoint(tmp_path / "c", TinyShape(layers=4, experts=4), sharding=sharding))
    plan = make_plan(read_checkpoint(source), Choices("MXFP4"))
    assert shard_need(plan, source, present) == walked(plan, source, present)


def test_room_is_taken_when_it_is_given_back() -> None:
    budget = DiskBudget(Event())
    budget.limit = 100
    budget.take(60)
    Timer(0.05, budget.give, (60,)).start()
    budget.take(70)
    assert budget.used == 70


def test_what_alone_is_too_large_is_not_waited_for_without_end() -> None:
    stop = Event()
    budget = DiskBudget(stop)
    budget.limit = 100
    budget.take(150)
    stop.set()
    with pytest.raises(Stopped):
        budget.take(1)
