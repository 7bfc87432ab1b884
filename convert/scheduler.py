"""Which work unit is next: shards are walked in their order, and one is let go when nothing needs it any more.

A unit is ready when every shard that its sources lie in has been acquired. A feeder thread acquires shards in order,
at most one beyond the one that is being worked on, so that a shard can be fetched while its predecessor is converted
without storing more. Shards that no unit needs, or whose units a resumed run finds done, are never acquired.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Thread

from convert.domain import PlannedTensor, Source
from convert.transforms import source_names
from convert.units import UnitTable
from quant.errors import InputError


class Scheduler:
    """Hands units to workers.

    Args:
        tensors: of the plan, in output order.
        units: their units.
        pending: numbers of the units to do.
        source: where shards are acquired and released.
        stamps: state of each shard when it was planned, by index.
        before_release: called before a shard is let go, so that what was made from it can be made safe.
    """

    def __init__(
        self,
        tensors: Sequence[PlannedTensor],
        units: UnitTable,
        pending: Iterable[int],
        source: Source,
        stamps: Sequence[str],
        before_release: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_release = before_release
        self._tensors = tensors
        self._units = units
        self._source = source
        self._stamps = stamps
        self._needed = [0] * len(source.shards)
        self._left = 0
        self._by_shard: dict[int, array[int]] = {}
        self._ready: deque[int] = deque()
        self._urgent: deque[int] = deque()
        self._unfinished: dict[int, int] = {}
        self._change = Condition()
        self._failure: BaseException | None = None
        self._stopped = False
        for number in pending:
            shards = self._shards_of(number)
            for shard in shards:
                self._needed[shard] += 1
            self._by_shard.setdefault(max(shards, default=-1), array("I")).append(number)
            self._left += 1
        self._feeder = Thread(target=self._feed, name="shards", daemon=True)

    def start(self) -> None:
        self._feeder.start()

    def next(self) -> int | None:
        """The next unit, waiting for one to become ready; -1 - n asks to finish file n; None when all is done."""
        with self._change:
            while True:
                if self._stopped or self._failure:
                    return None
                if self._urgent:
                    return -1 - self._urgent.popleft()
                if self._ready:
                    return self._ready.popleft()
                if not self._left:
                    return None
                self._change.wait()

    def finish_file(self, index: int) -> None:
        """Put the finishing of a file before all other work."""
        with self._change:
            self._urgent.append(index)
            self._left += 1
            self._change.notify_all()

    def file_finished(self) -> None:
        with self._change:
            self._left -= 1
            self._change.notify_all()

    def done(self, number: int) -> None:
        """A unit is done; shards that nothing else needs are released."""
        shards = self._shards_of(number)
        idle = []
        with self._change:
            for shard in shards:
                self._needed[shard] -= 1
                if not self._needed[shard]:
                    idle.append(shard)
        # Before the feeder learns of it: the next shard may take the place on disk that these give up.
        if idle:
            self._before_release()
        for shard in idle:
            self._check_stamp(shard)
            self._source.release(shard)
        with self._change:
            batch = max(shards, default=-1)
            self._unfinished[batch] -= 1
            if not self._unfinished[batch]:
                del self._unfinished[batch]
            self._left -= 1
            if not self._left or batch not in self._unfinished:
                self._change.notify_all()

    def stop(self, failure: BaseException | None = None) -> None:
        """Let every worker end after the unit it is at."""
        with self._change:
            self._stopped = True
            self._failure = self._failure or failure
            self._change.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What went wrong first."""
        return self._failure

    def _shards_of(self, number: int) -> set[int]:
        unit = self._units.unit(number)
        spec = self._tensors[unit.tensor].spec
        tensors = self._source.tensors
        return {tensors[name].shard for name in source_names(spec, unit.row_begin, unit.row_end)}

    def _feed(self) -> None:
        try:
            self._offer(-1)
            for shard in range(len(self._needed)):
                if not self._needed[shard]:
                    continue
                with self._change:
                    while not self._stopped and len(self._unfinished) > 1:
                        self._change.wait()
                    if self._stopped:
                        return
                self._source.acquire(shard)
                self._check_stamp(shard)
                self._offer(shard)
        except BaseException as error:
            self.stop(error)

    def _offer(self, shard: int) -> None:
        numbers = self._by_shard.pop(shard, None)
        if numbers is None:
            return
        with self._change:
            self._ready.extend(numbers)
            self._unfinished[shard] = len(numbers)
            self._change.notify_all()

    def _check_stamp(self, shard: int) -> None:
        now = self._source.stamp(shard)
        if now != self._stamps[shard]:
            raise InputError(
                f"{self._source.shards[shard].name} has changed since the conversion began "
                f"({self._stamps[shard]}, now {now})",
                "let nothing write to the checkpoint, then start again with --overwrite",
            )
