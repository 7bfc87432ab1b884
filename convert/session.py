"""Where a conversion stands on disk: what an earlier run left, what may be overwritten, what is left to do."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from convert.disk import disk_faults
from convert.domain import Plan, PlannedTensor, Source
from convert.journal import FileRecord, Journal, JournalHeader, open_journal
from convert.output import OutputSet
from convert.transforms import row_count, source_names
from convert.units import UnitTable
from quant.errors import OutputError


@dataclass(frozen=True, slots=True)
class Session:
    """An output that this process has locked.

    Attributes:
        journal: open, and in agreement with the files on disk.
        pending: numbers of the units to do, ascending.
        unfinished: indices of the files to check and rename.
    """

    journal: Journal
    pending: Sequence[int]
    unfinished: Sequence[int]


def begin(
    plan: Plan,
    source: Source,
    units: UnitTable,
    outputs: OutputSet,
    settings: Mapping[str, str],
    stamps: Sequence[str],
    *,
    overwrite: bool,
    elsewhere: Mapping[int, FileRecord] | None = None,
) -> Session:
    """Lock an output, and work out what of the plan is left to do; nothing is written but the journal.

    Args:
        elsewhere: files that another place holds, when finished files go there: they need not be here, and one that
            this conversion made is removed. None when files stay, which then must all have room.

    Raises:
        OutputError: another process works on it, it is there already, another plan's half is there, no room; or the
            other place holds other bytes.
        InputError: shards have changed since an earlier run.
    """
    used = _shards(plan.tensors, source)
    header = JournalHeader(
        plan.digest,
        settings,
        [file.name for file in plan.files],
        len(units),
        {source.shards[shard].name: stamps[shard] for shard in sorted(used)},
        source.revision or "",
    )
    fresh = not outputs.journal.exists()
    journal = open_journal(outputs.journal, header, overwrite=overwrite)
    try:
        if journal.changed:
            _forget_changed(journal, plan, source, units)
        _accept(journal, outputs, elsewhere or {})
        unfinished = _reconcile(journal, plan, units, outputs, elsewhere or {})
        present = [path for path in map(outputs.final, unfinished) if path.exists()]
        if present and not overwrite:
            raise OutputError(
                f"{present[0]} exists already" + (f", and {len(present) - 1} more" if len(present) > 1 else ""),
                "give --overwrite to replace it, or choose another --outfile or --outdir",
            )
        if elsewhere is None:
            outputs.check_room(unfinished, len(units))
    except BaseException:
        if fresh:
            journal.remove()
        else:
            journal.close()
        raise
    if journal.discarded:
        # Also under names that this plan has: what lies between tensors there is padding here.
        outputs.discard(journal.discarded.files)
    away = {n for i, t in enumerate(plan.tensors) if t.file in (elsewhere or {}) for n in units.of_tensor(i)}
    pending = [number for number, checksum in enumerate(journal.checksums) if checksum < 0 and number not in away]
    return Session(journal, pending, unfinished)


def done_bytes(plan: Plan, units: UnitTable, pending: Sequence[int]) -> int:
    """Bytes of tensor data that are not ``pending``."""
    total = sum(tensor.nbytes for tensor in plan.tensors)
    for number in pending:
        unit = units.unit(number)
        tensor = plan.tensors[unit.tensor]
        total -= tensor.nbytes * (unit.row_end - unit.row_begin) // row_count(tensor.spec)
    return total


def _shards(tensors: Iterable[PlannedTensor], source: Source) -> set[int]:
    return {
        source.tensors[name].shard
        for tensor in tensors
        for name in source_names(tensor.spec, 0, row_count(tensor.spec))
    }


def _forget_changed(journal: Journal, plan: Plan, source: Source, units: UnitTable) -> None:
    """Have everything that came from changed shards done again."""
    changed = frozenset(journal.changed)
    redo = []
    for number, checksum in enumerate(journal.checksums):
        if checksum >= 0:
            unit = units.unit(number)
            names = source_names(plan.tensors[unit.tensor].spec, unit.row_begin, unit.row_end)
            if any(source.shards[source.tensors[name].shard].name in changed for name in names):
                redo.append(number)
    stale = {plan.tensors[units.tensor_of(number)].file for number in redo} & journal.files.keys()
    whole = {
        number for index, tensor in enumerate(plan.tensors) if tensor.file in stale for number in units.of_tensor(index)
    }
    journal.forget(sorted(whole.union(redo)), sorted(stale))


def _accept(journal: Journal, outputs: OutputSet, elsewhere: Mapping[int, FileRecord]) -> None:
    """Take over what another place holds, and remove what this conversion made of the same."""
    for index, record in elsewhere.items():
        mine = journal.files.get(index)
        if mine is not None and mine.sha256 != record.sha256:
            raise OutputError(
                f"{outputs.files[index].name}: SHA-256 is {mine.sha256} here, {record.sha256} where it was published",
                "the checkpoint has changed between the runs: give --overwrite to make and publish everything anew",
            )
        if mine is None:
            journal.record_file(index, record)
        with disk_faults(outputs.final(index)):
            outputs.partial(index).unlink(missing_ok=True)
            if mine is not None:
                outputs.final(index).unlink(missing_ok=True)


def _reconcile(
    journal: Journal, plan: Plan, units: UnitTable, outputs: OutputSet, elsewhere: Container[int]
) -> list[int]:
    """Make the journal agree with the files that are really there; the files that are not finished."""
    unfinished = []
    lost = []
    for index in range(len(plan.files)):
        if index in elsewhere:
            continue
        if index in journal.files:
            if outputs.is_whole(outputs.partial(index), index):
                outputs.finish(index)
            if outputs.is_whole(outputs.final(index), index):
                continue
            lost.append(index)
        elif not outputs.is_whole(outputs.partial(index), index):
            lost.append(index)
        unfinished.append(index)
    missing = frozenset(lost)
    redo = [
        number
        for index, tensor in enumerate(plan.tensors)
        if tensor.file in missing
        for number in units.of_tensor(index)
        if journal.checksums[number] >= 0
    ]
    journal.forget(redo, [index for index in lost if index in journal.files])
    return unfinished
