"""Shards are walked in order, each acquired once and released when nothing needs it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from convert.domain import PlannedTensor, TensorSpec
from convert.scheduler import Scheduler
from convert.units import UnitTable
from quant.errors import InputError
from quant.tensors import TensorClass
from quant.types import QuantType
from tests.memory_source import MemorySource


def source(shards: Sequence[Sequence[str]]) -> MemorySource:
    names = [name for shard in shards for name in shard]
    return MemorySource({name: ("F32", np.zeros((1, 4), np.float32)) for name in names}, shards)


def planned(*sources: str) -> PlannedTensor:
    spec = TensorSpec("+".join(sources), (4,), TensorClass.NORM, None, sources, "product", "F32")
    return PlannedTensor(spec, QuantType.F32, 0, 0, 16, QuantType.F32)


def walk(memory: MemorySource, tensors: Sequence[PlannedTensor], pending: Sequence[int] | None = None) -> list[str]:
    units = UnitTable([t.spec for t in tensors])
    stamps = [memory.stamp(n) for n in range(len(memory.shards))]
    scheduler = Scheduler(tensors, units, range(len(units)) if pending is None else pending, memory, stamps)
    scheduler.start()
    while (number := scheduler.next()) is not None:
        memory.log.append(tensors[number].spec.name)
        scheduler.done(number)
    if scheduler.failure:
        raise scheduler.failure
    return memory.log


def without_waits(log: Sequence[str]) -> list[str]:
    """The log less its acquisitions, which run ahead by one shard at most."""
    return [line for line in log if not line.startswith("acquire")]


def test_each_shard_is_released_after_its_last_unit() -> None:
    memory = source([["a", "b"], ["c"]])
    log = walk(memory, [planned("a"), planned("b"), planned("c")])
    assert without_waits(log) == ["a", "b", "release 0", "c", "release 1"]


def test_a_pair_that_straddles_shards_waits_for_both_and_holds_both() -> None:
    memory = source([["a", "p"], ["c"], ["q"]])
    log = walk(memory, [planned("p", "q"), planned("a"), planned("c")])
    assert without_waits(log) == ["a", "c", "release 1", "p+q", "release 0", "release 2"]


def test_shards_that_no_pending_unit_needs_are_never_acquired() -> None:
    memory = source([["a"], ["vision"], ["b"], ["c"]])
    log = walk(memory, [planned("a"), planned("b"), planned("c")], pending=[1])
    assert log == ["acquire 2", "b", "release 2"]


def test_units_without_sources_are_done_too() -> None:
    memory = source([["a"]])
    assert sorted(without_waits(walk(memory, [planned(), planned("a")]))) == ["", "a", "release 0"]


def test_a_shard_is_acquired_at_most_one_ahead() -> None:
    memory = source([["a"], ["b"], ["c"], ["d"]])
    tensors = [planned(name) for name in "abcd"]
    scheduler = Scheduler(tensors, UnitTable([t.spec for t in tensors]), range(4), memory, ["same"] * 4)
    scheduler.start()
    first = scheduler.next()
    deadline = time.monotonic() + 5
    while "acquire 1" not in memory.log and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert memory.log == ["acquire 0", "acquire 1"]
    assert first == 0
    scheduler.stop()


def test_a_shard_that_changed_after_planning_stops_the_work() -> None:
    memory = source([["a"], ["b"]])
    memory.stamps[1] = "new"
    tensors = [planned("a"), planned("b")]
    scheduler = Scheduler(tensors, UnitTable([t.spec for t in tensors]), range(2), memory, ["same", "same"])
    scheduler.start()
    while (number := scheduler.next()) is not None:
        scheduler.done(number)
    with pytest.raises(InputError, match=r"shard-1 has changed since the conversion began \(same, now new\)"):
        raise scheduler.failure or AssertionError


def test_finishing_a_file_goes_before_all_units() -> None:
    memory = source([["a"], ["b"]])
    tensors = [planned("a"), planned("b")]
    scheduler = Scheduler(tensors, UnitTable([t.spec for t in tensors]), range(2), memory, ["same", "same"])
    scheduler.finish_file(3)
    scheduler.start()
    assert scheduler.next() == -4
    assert scheduler.next() == 0


def test_waiting_workers_end_when_another_fails() -> None:
    memory = source([["a"]])
    tensors = [planned("a")]
    scheduler = Scheduler(tensors, UnitTable([t.spec for t in tensors]), range(1), memory, ["same"])
    scheduler.start()
    assert scheduler.next() == 0
    results: list[int | None] = []
    waiting = threading.Thread(target=lambda: results.append(scheduler.next()))
    waiting.start()
    scheduler.stop(RuntimeError("broken"))
    waiting.join(5)
    assert results == [None]
    assert isinstance(scheduler.failure, RuntimeError)
