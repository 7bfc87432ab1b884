"""``convert --publish --as-you-go``: each finished file is uploaded, confirmed, and removed, while the next is made.

What has been done is written on the Hub: with each file goes the manifest, which names the plan and the hashes of the
files that are done so far. Whoever gives the same command, on this machine or another, reads it back, believes what
the Hub confirms by hash, and makes the rest. So a run may be killed at any moment:

    while a file is made            the journal beside it knows what is done
    before, or while it goes up     it is still here, and goes up again; what the Hub has of it is not sent twice
    before its commit               as before
    between commit and removal      the manifest on the Hub has it: the file here is removed
    after the last file             manifest and model card are committed by the next run
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from convert.delivery import ManifestOf
from convert.domain import Plan
from convert.journal import FileRecord
from convert.manifest import recorded_files
from convert.output import MANIFEST
from convert.units import UnitTable
from kimi_gguf.hub.repository import Repository
from kimi_gguf.hub.retry import Stopped
from kimi_gguf.publish.catalog import readme, stale_paths, with_published
from kimi_gguf.publish.facts import facts_of, read_manifest, without_paths
from kimi_gguf.publish.local import IMATRIX, manifest_path
from kimi_gguf.publish.removal import send_away
from kimi_gguf.publish.room import RoomySource, frame_bytes, output_steps
from kimi_gguf.publish.target import Operation, Target, Upload, small
from quant.errors import InputError, OutputError, UsageError
from quant.gguf_split import parse_split_name

_JOIN_SECONDS = 0.2


def set_stem(plan: Plan) -> str:
    """Name of a plan's set of files, which must end in the quant.

    Raises:
        UsageError: it does not.
    """
    name = plan.files[0].name
    split = parse_split_name(name)
    stem = split[0] if split and len(plan.files) > 1 else name.removesuffix(".gguf")
    if not stem.upper().endswith(f"-{plan.recipe}"):
        raise UsageError(
            f"{name} does not end in -{plan.recipe}, so llama.cpp's -hf REPO:{plan.recipe} would miss it",
            "give --outdir instead of --outfile: files are then named by convention",
        )
    return stem


class AsYouGo:
    """A ``convert.delivery.Delivery`` into a branch on the Hub.

    Args:
        target: that branch.
        source: of the conversion; its budget hears of output.
        stop: set when publishing has failed, so that the conversion ends; shared with ``source``.
        create, private: make the repository where it is missing.
        overwrite: believe nothing that is there; make and publish everything anew.
        imatrix: published with the card.

    Attributes:
        failure: what went wrong with an upload.
    """

    def __init__(
        self,
        target: Target,
        source: RoomySource,
        stop: Event,
        *,
        create: bool = False,
        private: bool = False,
        overwrite: bool = False,
        imatrix: Path | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._target = target
        self._source = source
        self._stop = stop
        self._create = create
        self._private = private
        self._overwrite = overwrite
        self._imatrix = imatrix
        self._queue: SimpleQueue[tuple[int, Path, FileRecord] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="publish", daemon=True)
        self._records: dict[int, FileRecord] = {}

    def begin(self, plan: Plan, manifest_of: ManifestOf) -> Mapping[int, FileRecord]:
        """What the Hub holds of this plan, by its manifest and confirmed by its hashes.

        Raises:
            OutputError: it holds another plan's files.
            InputError: the Hub refuses, or its card cannot be read.
        """
        self._plan, self._manifest_of = plan, manifest_of
        self._folder = plan.recipe
        self._manifest = manifest_path(self._folder, set_stem(plan))
        state = self._target.create(private=self._private) if self._create else self._target.look()
        for card in readme(self._target.repo, with_published([], state), state):
            self._target.check_card(card)
        if not self._overwrite:
            self._check_alone(state)
        self._records = {} if self._overwrite else self._published(state)
        document = self._read(state)
        if document is None or self._overwrite or len(self._records) < len(self._recorded(document)):
            text = f"{plan.recipe}: begun by kimi-gguf"
            self._target.commit(lambda now: [self._progress(self._records)], text)
        return dict(self._records)

    def _check_alone(self, state: Repository) -> None:
        inside = f"{self._folder}/"
        manifests = [p for p in state.files if p.startswith(inside) and p.endswith(MANIFEST) and p != self._manifest]
        if manifests:
            raise OutputError(
                f"{self._target.repo} holds another {self._folder} already: {manifests[0]}",
                "give --overwrite to replace it, or choose another repository",
            )

    def _read(self, state: Repository) -> dict[str, Any] | None:
        if self._manifest not in state.files:
            return None
        return read_manifest(state.read_whole(self._manifest), f"{self._target.repo}/{self._manifest}")

    def _published(self, state: Repository) -> dict[int, FileRecord]:
        document = self._read(state)
        if document is None:
            return {}
        where = f"{self._target.repo}/{self._folder}"
        revision = (document.get("source") or {}).get("revision")
        if document.get("plan_sha256") != self._plan.digest or revision != self._source.revision:
            before = f"{document.get('settings')} of {(document.get('source') or {}).get('origin')}"
            raise OutputError(
                f"{where} holds files of another conversion: {before}",
                "give that command to continue it, --overwrite to replace them, or another repository",
            )
        found = {}
        for index, record in self._recorded(document).items():
            planned = self._plan.files[index]
            held = state.files.get(f"{self._folder}/{planned.name}")
            if held is not None and (held.sha256, held.nbytes) == (record.sha256, planned.nbytes):
                found[index] = record
        return found

    def _recorded(self, document: Mapping[str, Any]) -> dict[int, FileRecord]:
        try:
            return recorded_files(document)
        except (KeyError, TypeError):
            raise InputError(
                f"{self._target.repo}/{self._manifest} is damaged", "give --overwrite to publish everything anew"
            ) from None

    def started(self, plan: Plan, units: UnitTable, pending: Sequence[int], finished: Sequence[int]) -> None:
        """Count what is on disk, and begin to publish."""
        steps = output_steps(plan, self._source, units, pending)
        waiting = set(pending)
        away = set(self._records)
        here = [i for i in range(len(plan.files)) if i not in away]
        held = sum(plan.files[i].nbytes if i in finished else frame_bytes(plan, i) for i in here)
        done = sum(
            t.nbytes - _pending_bytes(units, i, t.nbytes, waiting)
            for i, t in enumerate(plan.tensors)
            if t.file in here and t.file not in finished
        )
        self._source.made = steps.made
        self._source.budget.add(held + done + steps.made.get(-1, 0))
        self._thread.start()

    def take(self, index: int, path: Path, record: FileRecord) -> None:
        """Queue a file.

        Raises:
            what an earlier upload met.
        """
        if self.failure:
            raise self.failure
        self._queue.put((index, path, record))

    def finish(self, manifest: bytes) -> None:
        """Wait for the uploads, then commit manifest, importance matrix and model card.

        Raises:
            InputError: the Hub refuses, or fails too often.
        """
        self._queue.put(None)
        while self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        if self.failure:
            raise self.failure
        whole = read_manifest(manifest, "the manifest")
        state = self._target.look()
        there = self._read(state)
        if there is not None and there.get("complete"):
            whole = there
        final: list[Operation] = [small(self._manifest, without_paths(whole))]
        if self._imatrix is not None:
            name = IMATRIX if self._imatrix.suffix == ".gguf" else f"imatrix{self._imatrix.suffix}"
            final.append(self._target.upload(Upload(name, self._imatrix, self._imatrix.stat().st_size, None)))
        facts = facts_of(whole)

        def make(now: Repository) -> list[Operation]:
            return [*final, *readme(self._target.repo, with_published([facts], now), now)]

        keep = {self._manifest, *(f"{self._folder}/{file.name}" for file in self._plan.files)}
        self._target.commit(make, f"{self._plan.recipe} by kimi-gguf", stale_paths(state, [facts], keep))

    def abandon(self) -> None:
        """Stop after the upload that is under way, which may go on in the background for a moment."""
        self._stop.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        try:
            while (job := self._queue.get()) is not None and not self._stop.is_set():
                self._publish(*job)
        except Stopped:
            pass
        except BaseException as error:
            self.failure = error
            self._stop.set()

    def _publish(self, index: int, path: Path, record: FileRecord) -> None:
        name = f"{self._folder}/{path.name}"
        nbytes = self._plan.files[index].nbytes

        def progress(now: Repository) -> list[Operation]:
            # Another machine may be at the same work: what it has published is kept in the manifest.
            known = {} if self._overwrite else self._published(now)
            return [self._progress(known | self._records | {index: record})]

        send_away(self._target, Upload(name, path, nbytes, record.sha256), f"{path.name} by kimi-gguf", progress)
        self._records[index] = record
        self._source.budget.give(nbytes)

    def _progress(self, records: Mapping[int, FileRecord]) -> Upload:
        """The manifest of what is done."""
        document = json.loads(self._manifest_of(records))
        # Time is stated once, in the manifest of the whole; the same progress has the same bytes.
        document |= {"finished": None, "complete": False}
        return small(self._manifest, without_paths(document))


def _pending_bytes(units: UnitTable, tensor: int, nbytes: int, pending: set[int]) -> int:
    """Bytes of a tensor that are still to be written."""
    numbers = units.of_tensor(tensor)
    todo = [units.unit(n) for n in numbers if n in pending]
    rows = sum(unit.row_end - unit.row_begin for unit in todo)
    return nbytes * rows // units.unit(numbers[-1]).row_end
