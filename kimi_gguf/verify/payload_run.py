"""The work of ``verify``: recognises encoders, hands pieces of tensors to threads, turns what they find into verdicts.

Pieces are about a million weights and a bounded number of them waits, so memory does not grow with the model.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from convert.domain import TensorSpec
from convert.transforms import TRANSFORMS, chunks, row_count
from kimi_gguf.verify.diagnosis import diagnose
from kimi_gguf.verify.observations import Progress
from kimi_gguf.verify.payload_rows import (
    Candidate,
    Compared,
    Pair,
    allowed_error,
    compare_exactly,
    compare_within_bounds,
    has_one_encoding,
    is_float,
)
from kimi_gguf.verify.sampling import sample_rows, sample_spots
from kimi_gguf.verify.verdicts import TensorVerdict
from quant import ggml
from quant.errors import KimiGgufError
from quant.gguf_parser import GgufTensor
from quant.recipe_floors import FLOORS, below
from quant.tensors import TensorClass
from quant.types import row_bytes

_PIECE_WEIGHTS = 1 << 20
_DIAGNOSED = 3
_PROBES = 5
_HARD_FLOORS = frozenset(
    {
        TensorClass.ROUTER,
        TensorClass.ROUTER_BIAS,
        TensorClass.NORM,
        TensorClass.RESIDUAL_SCORE,
        TensorClass.KDA_CONV,
        TensorClass.KDA_STATE,
    }
)


@dataclass(slots=True)
class _Job:
    """One tensor on its way: how it is compared, and what its pieces gave."""

    spec: TensorSpec
    tensor: GgufTensor
    how: Candidate | None
    pieces: int = 0
    done: bool = False
    checked: int = 0
    bad: tuple[int, ...] = ()
    wrong: int = 0
    error2: float = 0.0
    norm2: float = 0.0
    reference2: float = 0.0
    fault: str | None = None

    def add(self, seen: Compared) -> None:
        self.checked += seen.rows
        self.wrong += len(seen.bad)
        # Enough to say which experts; a broken tensor has millions of bad rows.
        self.bad = (*self.bad, *seen.bad)[:1024]
        self.error2 += seen.error2
        self.norm2 += seen.norm2
        self.reference2 += seen.reference2


class _Votes:
    """Of ``probes`` rows, how many some encoder explains, and how many each does."""

    def __init__(self) -> None:
        self.by: Counter[Candidate] = Counter()
        self.probes = 0
        self.explained = 0

    def add(self, other: _Votes) -> None:
        self.by.update(other.by)
        self.probes += other.probes
        self.explained += other.explained


class PayloadRun:
    """Compares all tensors of one GGUF with what the checkpoint makes of them.

    Args:
        pair: both sides.
        share, seed: which rows.
        weighed_unknown: the file was made with an importance matrix that is not at hand.
        spots: read a few runs of each tensor instead.
    """

    def __init__(
        self,
        pair: Pair,
        share: float,
        seed: int,
        threads: int,
        progress: Progress,
        weighed_unknown: bool,
        *,
        spots: bool = False,
    ) -> None:
        self.pair = pair
        self.share = share
        self.seed = seed
        self.threads = threads
        self.progress = progress
        self.weighed_unknown = weighed_unknown
        self._sample = sample_spots if spots else sample_rows
        self.bytes_read = 0

    def verdicts(self, matched: Sequence[tuple[TensorSpec, GgufTensor]]) -> list[TensorVerdict]:
        """Compare all tensors, in order."""
        shards = {self.pair.source.tensors[n.format(e=0)].shard for spec, _ in matched for n in spec.sources}
        for shard in sorted(shards):
            self.pair.source.acquire(shard)
        self.progress.begin("tensors", len(matched))
        with ThreadPoolExecutor(self.threads) as pool:
            ways = self._recognise(matched, pool)
            jobs = [_Job(spec, tensor, way) for (spec, tensor), way in zip(matched, ways, strict=True)]
            self._compare(jobs, pool)
        return [self._verdict(job) for job in jobs]

    def _recognise(
        self, matched: Sequence[tuple[TensorSpec, GgufTensor]], pool: ThreadPoolExecutor
    ) -> list[Candidate | None]:
        """How each tensor was encoded; None where that cannot be told."""
        every = list(pool.map(lambda pair: self._votes(*pair), matched))
        groups: dict[tuple[str, str], _Votes] = {}
        for (spec, tensor), votes in zip(matched, every, strict=True):
            groups.setdefault((spec.source_type, tensor.qtype.name), _Votes()).add(votes)
        return [
            self._way(spec, tensor, votes, groups[spec.source_type, tensor.qtype.name])
            for (spec, tensor), votes in zip(matched, every, strict=True)
        ]

    def _way(self, spec: TensorSpec, tensor: GgufTensor, votes: _Votes, group: _Votes) -> Candidate | None:
        if has_one_encoding(spec, tensor.qtype):
            return Candidate("ggml", False) if tensor.qtype in ggml.ENCODABLE else None
        possible = self.pair.candidates(spec, tensor.qtype)
        best = max(possible, key=lambda c: (votes.by[c], group.by[c]), default=None)
        if best is None or (votes.probes and votes.by[best] == votes.probes and self.weighed_unknown):
            return best
        # Rows of a tensor may be damaged; most of all rows of this type cannot be, or the encoder is another one,
        # an older version of ours for example, or had an importance matrix that is not at hand.
        return best if 2 * group.explained >= group.probes and group.by[best] else None

    def _votes(self, spec: TensorSpec, tensor: GgufTensor) -> _Votes:
        """Which encoders explain a few rows from the tensor's beginning to its end."""
        votes = _Votes()
        if has_one_encoding(spec, tensor.qtype):
            return votes
        quantum = TRANSFORMS[spec.transform].quantum(spec)
        last = row_count(spec) // quantum - 1
        for number in sorted({round(last * part / (_PROBES - 1)) for part in range(_PROBES)}):
            begin = number * quantum
            votes.probes += 1
            try:
                rows = self.pair.expected(spec, begin, begin + quantum)
                found = self.pair.found(spec.name, begin, begin + quantum)
                right = [
                    candidate
                    for candidate in self.pair.candidates(spec, tensor.qtype)
                    if (self.pair.encoded(spec, tensor.qtype, candidate, rows, begin) == found).all()
                ]
            except KimiGgufError:
                continue
            votes.by.update(right)
            votes.explained += bool(right)
        return votes

    def _compare(self, jobs: Sequence[_Job], pool: ThreadPoolExecutor) -> None:
        """Do all pieces; a bounded number waits, so that memory does not grow with the model."""
        waiting: deque[tuple[_Job, Future[list[Compared]]]] = deque()
        finished = 0

        def settle() -> None:
            nonlocal finished
            job, future = waiting.popleft()
            try:
                for seen in future.result():
                    job.add(seen)
            except KimiGgufError as fault:
                job.fault = job.fault or fault.message
            job.pieces -= 1
            if job.done and not job.pieces:
                finished += 1
                self.progress.step(finished, job.spec.name)

        for job in jobs:
            for piece in self._pieces(job):
                job.pieces += 1
                waiting.append((job, pool.submit(self._piece, job, piece)))
                if len(waiting) > 2 * self.threads:
                    settle()
            job.done = True
        while waiting:
            settle()

    def _pieces(self, job: _Job) -> Iterator[list[tuple[int, int]]]:
        """Ranges of rows in groups of about a million weights; none crosses a matrix with its own importance."""
        spec = job.spec
        matrices = math.prod(spec.shape[:-2]) if job.how and job.how.weighed else 1
        piece: list[tuple[int, int]] = []
        weights = 0
        for begin, end in self._sample(spec, self.share, self.seed):
            for part in chunks(spec, begin, end, _PIECE_WEIGHTS, matrices):
                piece.append(part)
                weights += (part[1] - part[0]) * spec.shape[-1]
                if weights >= _PIECE_WEIGHTS:
                    yield piece
                    piece, weights = [], 0
        if piece:
            yield piece

    def _piece(self, job: _Job, ranges: Iterable[tuple[int, int]]) -> list[Compared]:
        spec, qtype = job.spec, job.tensor.qtype
        if job.how is None:
            return [compare_within_bounds(self.pair, spec, qtype, begin, end) for begin, end in ranges]
        return [compare_exactly(self.pair, spec, qtype, job.how, begin, end) for begin, end in ranges]

    def _verdict(self, job: _Job) -> TensorVerdict:
        spec, qtype = job.spec, job.tensor.qtype
        exact = has_one_encoding(spec, qtype)
        measured = not (exact and not job.wrong) and job.norm2 > 0
        weighed = self.weighed_unknown or self.pair.weighed(spec)
        allowed = None if job.how else allowed_error(qtype, job.reference2, job.norm2, weighed=weighed)
        error = math.sqrt(job.error2 / job.norm2) if measured else (0.0 if exact and not job.wrong else None)
        self.bytes_read += job.checked * row_bytes(qtype, spec.shape[-1]) + _source_bytes(spec, job.checked)
        return TensorVerdict(
            name=spec.name,
            cls=spec.cls,
            source_type=spec.source_type,
            qtype=qtype.name,
            method="bits" if exact else "re-encoded" if job.how else "error bound",
            encoder=str(job.how) if job.how and not exact else "",
            rows=row_count(spec),
            checked=job.checked,
            wrong=job.wrong,
            error=error,
            allowed=allowed,
            faults=tuple(self._faults(job, error, allowed)),
        )

    def _faults(self, job: _Job, error: float | None, allowed: float | None) -> Iterator[str]:
        spec, qtype = job.spec, job.tensor.qtype
        if job.fault:
            yield job.fault
        floor = FLOORS.get(spec.cls)
        if floor is not None and spec.cls in _HARD_FLOORS and below(qtype, floor):
            yield f"a {spec.cls} stored as {qtype.name}: it must be {floor.name}"
        elif spec.cls is TensorClass.ROUTER and not is_float(qtype):
            yield f"the router is quantized to {qtype.name}"
        if job.wrong:
            yield f"{job.wrong} of {job.checked} rows differ"
            yield from self._causes(job)
        elif error is not None and allowed is not None and not error <= allowed:
            yield f"its error of {error:.3g} is more than {qtype.name} explains ({allowed:.3g})"

    def _causes(self, job: _Job) -> Iterator[str]:
        """What happened to the first bad row of each of the first bad experts."""
        rows = row_count(job.spec) // (job.spec.experts or 1)
        firsts: dict[int, int] = {}
        for row in job.bad:
            firsts.setdefault(row // rows, row)
        for row in list(firsts.values())[:_DIAGNOSED]:
            yield diagnose(self.pair, job.spec, job.tensor.qtype, row)
        if len(firsts) > _DIAGNOSED:
            yield f"and {len(firsts) - _DIAGNOSED} more experts"


def _source_bytes(spec: TensorSpec, rows: int) -> int:
    bits = {"MXFP4": 4.25, "BF16": 16, "F32": 32}[spec.source_type]
    return int(rows * spec.shape[-1] * bits / 8)
