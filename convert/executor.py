"""Moves the bytes of a plan: threads take units from one queue, and each unit is read, transformed, encoded, written.

    shard --read_into--> operands --transform--> rows --encode--> blocks --pwrite--> partial file
                                                                    \\--CRC-32C--> journal

A unit is worked on in chunks that fit a processor's cache, in buffers that a thread keeps, so memory is threads times
a chunk. A background thread journals finished units once their data is synced. When the last unit of a file is done
the file is read back, recorded, and renamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from threading import Event, Lock, Thread, local
from typing import Any, Literal

import numpy as np

from convert.domain import Plan, PlannedTensor, Source
from convert.journal import Journal
from convert.output import OutputSet
from convert.plan_warnings import uses_importance
from convert.progress import Progress
from convert.readback import DamagedUnits, check_file
from convert.reading import fill, located
from convert.scheduler import Scheduler
from convert.transforms import TRANSFORMS, Array, Operand, chunks, row_count
from convert.units import UnitTable
from quant.digest import crc32c
from quant.encode import encode
from quant.errors import UsageError, ValueFault
from quant.imatrix import Imatrix
from quant.native import EncodeStats
from quant.tensors import F32Array, U8Array
from quant.types import QuantType

CHUNK_WEIGHTS = 1 << 20
FLUSH_SECONDS = 1.0
_MATRICES_REMEMBERED = 64


class Tally:
    """What our encoders did to the blocks of each type; may be told by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.by_type: dict[str, EncodeStats] = {}

    def add(self, qtype: QuantType, stats: EncodeStats) -> None:
        with self._lock:
            self.by_type[qtype.name] = self.by_type.get(qtype.name, EncodeStats()) + stats


@dataclass(frozen=True, slots=True)
class Job:
    """All that a conversion works with."""

    plan: Plan
    source: Source
    units: UnitTable
    outputs: OutputSet
    journal: Journal
    stamps: Sequence[str]
    imatrix: Imatrix | None = None
    tally: Tally = field(default_factory=Tally)


def run(
    job: Job,
    pending: Sequence[int],
    unfinished: Sequence[int],
    *,
    threads: int,
    progress: Progress,
    on_file_done: Callable[[Path], None] | None = None,
    flush_seconds: float = FLUSH_SECONDS,
) -> None:
    """Do the units ``pending``, then check and rename each of the files ``unfinished``.

    Args:
        pending: numbers of units, ascending.
        unfinished: indices of files without a final name.
        on_file_done: called with the path of each file that got its final name, from a worker thread.

    Raises:
        ValueFault: a value that no output may contain; names tensor, expert and row.
        OutputError: the disk is full or failed, or a file differs from what was written.
        InputError: a shard cannot be read, or changed.
        KeyboardInterrupt: after the journal has been brought up to date.
    """
    _Run(job, pending, unfinished, threads, progress, on_file_done, flush_seconds).execute()


class _Run:
    def __init__(
        self,
        job: Job,
        pending: Sequence[int],
        unfinished: Sequence[int],
        threads: int,
        progress: Progress,
        on_file_done: Callable[[Path], None] | None,
        flush_seconds: float,
    ) -> None:
        self.job = job
        self.threads = threads
        self.progress = progress
        self.on_file_done = on_file_done
        self.flush_seconds = flush_seconds
        self.scheduler = Scheduler(job.plan.tensors, job.units, pending, job.source, job.stamps, self._flush)
        self.worker = UnitWorker(job)
        self.left = dict.fromkeys(unfinished, 0)
        self.left_lock = Lock()
        for number in pending:
            self.left[job.plan.tensors[job.units.tensor_of(number)].file] += 1
        for index, count in self.left.items():
            if not count:
                self.scheduler.finish_file(index)
        self.over = Event()

    def execute(self) -> None:
        # Daemons, so that a second Ctrl-C ends the process at once; the journal allows for that.
        workers = [Thread(target=self._work, name=f"worker {n}", daemon=True) for n in range(self.threads)]
        flusher = Thread(target=self._flush_now_and_then, name="journal", daemon=True)
        try:
            for thread in (*workers, flusher):
                thread.start()
        except RuntimeError:
            self.scheduler.stop()
            raise UsageError(f"this system cannot start {self.threads} threads", "give a smaller --threads") from None
        self.scheduler.start()
        try:
            for thread in workers:
                thread.join()
        finally:
            # An interrupt arrives here too: workers end after the unit they are at.
            self.scheduler.stop()
            for thread in workers:
                thread.join()
            self.over.set()
            flusher.join()
            self._flush()
        if self.scheduler.failure:
            raise self.scheduler.failure

    def _work(self) -> None:
        try:
            while (task := self.scheduler.next()) is not None:
                if task < 0:
                    self._finish(-1 - task)
                else:
                    self._do(task)
        except BaseException as error:
            self.scheduler.stop(error)

    def _do(self, number: int) -> None:
        tensor = self.job.plan.tensors[self.job.units.tensor_of(number)]
        checksum, nbytes = self.worker.do(number)
        self.job.journal.record(number, checksum)
        with self.left_lock:
            self.left[tensor.file] -= 1
            complete = not self.left[tensor.file]
        if complete:
            self.scheduler.finish_file(tensor.file)
        self.scheduler.done(number)
        self.progress.wrote(nbytes)

    def _finish(self, index: int) -> None:
        job = self.job
        self._flush()
        job.outputs.sync()
        tensors = [(i, t) for i, t in enumerate(job.plan.tensors) if t.file == index]
        try:
            record = check_file(
                job.outputs.partial(index),
                job.plan.files[index],
                tensors,
                job.units,
                job.journal.checksums,
                checked=self.progress.checked,
            )
        except DamagedUnits as fault:
            job.journal.forget(fault.units)
            raise
        job.journal.record_file(index, record)
        path = job.outputs.finish(index)
        self.scheduler.file_finished()
        self.progress.finished(path)
        if self.on_file_done:
            self.on_file_done(path)

    def _flush(self) -> None:
        self.job.journal.flush(self.job.outputs.sync)

    def _flush_now_and_then(self) -> None:
        try:
            while not self.over.wait(self.flush_seconds):
                self._flush()
        except BaseException as error:
            self.scheduler.stop(error)


class UnitWorker:
    """Reads, transforms, encodes and writes units; used by several threads at once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._encoder: Literal["ggml", "native"] = job.plan.encoder  # type: ignore[assignment]
        self._local = local()
        self._importance = lru_cache(_MATRICES_REMEMBERED)(self._load_importance)

    def do(self, number: int) -> tuple[int, int]:
        """Write unit ``number``; its CRC-32C and its bytes."""
        job = self._job
        unit = job.units.unit(number)
        tensor = job.plan.tensors[unit.tensor]
        spec = tensor.spec
        row_bytes = tensor.nbytes // row_count(spec)
        matrices = self._weighed_matrices(unit.tensor)
        checksum = total = 0
        for begin, end in chunks(spec, unit.row_begin, unit.row_end, CHUNK_WEIGHTS, matrices or 1):
            importance = self._importance(unit.tensor, begin * matrices // row_count(spec)) if matrices else None
            data = self._chunk(tensor, begin, end, importance).reshape(-1)
            job.outputs.write(tensor.file, data.data, tensor.offset + begin * row_bytes)
            checksum = crc32c(data, checksum)
            total += data.size
        return checksum, total

    def _chunk(self, tensor: PlannedTensor, begin: int, end: int, importance: F32Array | None) -> U8Array:
        """Encoded rows [begin, end) of a tensor, which lie in one matrix of a stack if importance is given."""
        spec = tensor.spec
        transform = TRANSFORMS[spec.transform]
        operands = transform.reads(spec, self._job.source.tensors, begin, end)
        try:
            rows = transform.apply(spec, [self._read(n, operand) for n, operand in enumerate(operands)])
            return encode(rows, tensor.qtype, encoder=self._encoder, importance=importance, tally=self._tally(tensor))
        except ValueFault as fault:
            raise located(fault, self._job.source, spec, begin) from fault

    def _tally(self, tensor: PlannedTensor) -> Callable[[EncodeStats], None]:
        return partial(self._job.tally.add, tensor.qtype)

    def _read(self, slot: int, operand: Operand) -> Array:
        """The array of an operand, in this thread's buffer number ``slot``."""
        buffers: list[Any] = self._local.__dict__.setdefault("buffers", [])
        if slot == len(buffers):
            buffers.append(np.empty(0, dtype=np.uint8))
        if buffers[slot].size < operand.nbytes:
            buffers[slot] = np.empty(operand.nbytes, dtype=np.uint8)
        return fill(self._job.source, operand, buffers[slot][: operand.nbytes])

    def _weighed_matrices(self, index: int) -> int:
        """Number of stacked matrices that have importance of their own; 0 when the tensor has none or uses none."""
        tensor = self._job.plan.tensors[index]
        imatrix = self._job.imatrix
        if imatrix is None or not uses_importance(tensor) or not imatrix.check(tensor.spec.name, tensor.spec.shape):
            return 0
        return math.prod(tensor.spec.shape[:-2])

    def _load_importance(self, index: int, matrix: int) -> F32Array | None:
        if self._job.imatrix is None:
            return None
        spec = self._job.plan.tensors[index].spec
        return self._job.imatrix.importance_of(spec.name, spec.shape, matrix)
