"""The function behind the verb ``convert``; its parameters are named as the flags.

Example:
    >>> convert("Kimi-K3.1-Pro", quant="Q4_K_M", outdir="out", split_max_size="48G")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from convert.delivery import Delivery
from convert.domain import ConvertResult, Plan, Source
from convert.executor import FLUSH_SECONDS, Job, run
from convert.flags import PathLike, choices_from_flags
from convert.journal import FileRecord
from convert.manifest import manifest_bytes
from convert.output import OutputSet, write_atomically
from convert.plan import Choices, check_importance, load_imatrix, make_plan, padding, read_checkpoint
from convert.progress import Progress, Silent
from convert.session import begin, done_bytes
from convert.source import open_source
from convert.target_size import within_target
from convert.threads import worker_count
from convert.units import UnitTable
from quant.errors import OutputError, UsageError
from quant.gguf_split import parse_split_name
from quant.imatrix import Imatrix
from quant.recipes import resolve


def convert(
    src: PathLike | Source | None = None,
    *,
    quant: str | None = None,
    recipe: PathLike | None = None,
    target_size: str | int | None = None,
    outfile: PathLike | None = None,
    outdir: PathLike | None = None,
    split_max_size: str | int | None = None,
    name: str | None = None,
    imatrix: PathLike | None = None,
    tensor_type: Sequence[str] = (),
    output_tensor_type: str | None = None,
    token_embedding_type: str | None = None,
    override_kv: Sequence[str] = (),
    encoder: Literal["ggml", "native"] = "native",
    no_fallback: bool = False,
    force: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    on_file_done: Callable[[Path], None] | None = None,
    delivery: Delivery | None = None,
) -> ConvertResult:
    """Convert a checkpoint to GGUF, or continue a conversion that was interrupted.

    Args:
        src: folder of the checkpoint, or any ``Source``; None is the current folder.
        quant: recipe, for example ``MXFP4`` or ``Q4_K_M``, in any case. One of this and the next two is given.
        recipe: text file with a type for each tensor, as ``target_size`` writes beside its output.
        target_size: bytes, or a number with K, M, G or T: the types with the least measured error that fit.
        outfile: one output file; not together with ``outdir``.
        outdir: folder for files named by convention, split at 48 GB; the current folder when neither is given.
        split_max_size: largest file, header included: bytes, or a number with K, M, G (1e9) or T.
        name: of the model, when not the checkpoint's own.
        imatrix: importance matrix, GGUF or legacy.
        tensor_type: ``REGEX=TYPE`` texts, the first match decides.
        output_tensor_type, token_embedding_type: types of ``output.weight`` and ``token_embd.weight``.
        override_kv: ``KEY=TYPE:VALUE`` texts.
        encoder: ``ggml`` for llama.cpp's bytes, ``native`` for ours.
        no_fallback: refuse instead of replacing a type that a tensor's rows do not fit.
        force: allow types below the floors.
        threads: workers; None takes the processors that this process may use.
        dry_run: plan and stop.
        overwrite: replace finished files, discard the half of another plan, redo what came from changed shards.
        progress: told of everything that happens.
        on_plan: called with the valid plan before anything is written; may raise to stop.
        on_file_done: called from a worker thread with each file that has its final name.
        delivery: takes finished files away; those are not in the result. Room on disk is then its affair.

    Raises:
        UsageError: parameters that make no sense together; nothing has been written.
        InputError: the checkpoint or imatrix cannot be used; nothing has been written.
        ValueFault: a value met on the way that no output may contain; the partial output stays.
        OutputError: the output cannot be written or is there already.
        KeyboardInterrupt: the partial output stays, and the same call continues it.
    """
    started = time.monotonic()
    progress = progress or Silent()
    directory, choices = choices_from_flags(
        quant=quant,
        recipe=recipe,
        target_size=target_size,
        outfile=outfile,
        outdir=outdir,
        split_max_size=split_max_size,
        name=name,
        tensor_type=tensor_type,
        output_tensor_type=output_tensor_type,
        token_embedding_type=token_embedding_type,
        override_kv=override_kv,
        encoder=encoder,
        no_fallback=no_fallback,
        force=force,
    )
    workers = worker_count(threads)
    if quant is not None and imatrix is None and resolve(quant).needs_imatrix:
        raise UsageError(
            f"{resolve(quant).name} needs an importance matrix", "give --imatrix FILE, or choose another --quant"
        )
    with _opened(src) as source:
        stamps = [source.stamp(shard) for shard in range(len(source.shards))]
        checkpoint = read_checkpoint(source)
        importance = None if imatrix is None else load_imatrix(imatrix, checkpoint)
        choices = within_target(checkpoint, choices, importance, threads=workers, measured=progress.measured)
        plan = make_plan(checkpoint, choices, importance)
        check_importance(plan, importance)
        if on_plan:
            on_plan(plan)
        if dry_run:
            return ConvertResult(plan, (), None, time.monotonic() - started)
        _make_directory(directory, outdir is not None)
        outputs = OutputSet(directory, _set_name(plan), plan.files)
        settings = _settings(choices, importance)
        units = UnitTable([tensor.spec for tensor in plan.tensors])
        imatrix_sha256 = importance.sha256 if importance else None
        recipe_file = None
        if choices.target_size is not None:
            recipe_file = directory / f"{_set_name(plan).removesuffix('.gguf')}.recipe"

        def manifest_of(records: Mapping[int, FileRecord]) -> bytes:
            return manifest_bytes(checkpoint, plan, settings, records, imatrix_sha256=imatrix_sha256)

        elsewhere = None if delivery is None else delivery.begin(plan, manifest_of)
        session = begin(plan, source, units, outputs, settings, stamps, overwrite=overwrite, elsewhere=elsewhere)

        def file_done(path: Path) -> None:
            if on_file_done:
                on_file_done(path)
            if delivery:
                index = [file.name for file in plan.files].index(path.name)
                delivery.take(index, path, session.journal.files[index])

        try:
            if recipe_file is not None:
                write_atomically(recipe_file, plan.table.encode())
            progress.planned(plan, len(units) - len(session.pending), done_bytes(plan, units, session.pending))
            for index in session.unfinished:
                outputs.prepare(index, padding(plan, index))
            if delivery:
                waiting = [i for i in sorted(session.journal.files) if i not in (elsewhere or {})]
                delivery.started(plan, units, session.pending, waiting)
                for index in waiting:
                    delivery.take(index, outputs.final(index), session.journal.files[index])
            job = Job(plan, source, units, outputs, session.journal, stamps, importance)
            run(
                job,
                session.pending,
                session.unfinished,
                threads=workers,
                progress=progress,
                on_file_done=file_done,
                flush_seconds=FLUSH_SECONDS,
            )
            manifest = manifest_of(session.journal.files)
            if delivery:
                delivery.finish(manifest)
            write_atomically(outputs.manifest, manifest)
        except BaseException:
            session.journal.close()
            if delivery:
                delivery.abandon()
            raise
        finally:
            outputs.close()
        session.journal.remove()
    files = () if delivery else tuple(outputs.final(index) for index in range(len(plan.files)))
    resumed = len(units) - len(session.pending)
    return ConvertResult(
        plan,
        files,
        outputs.manifest,
        time.monotonic() - started,
        resumed,
        recipe=recipe_file,
        encoded=dict(sorted(job.tally.by_type.items())),
    )


@contextmanager
def _opened(src: PathLike | Source | None) -> Iterator[Source]:
    """The checkpoint to read; one that is opened here is closed here."""
    if src is not None and not isinstance(src, str | os.PathLike):
        yield src
        return
    folder = Path.cwd() if src is None else Path(src)
    if src is None and not (folder / "config.json").is_file():
        raise UsageError(
            "no checkpoint is named, and the current folder holds none",
            "name the folder that holds config.json and the safetensors shards",
        )
    with open_source(folder) as source:
        yield source


def _set_name(plan: Plan) -> str:
    """Name of the output as a whole: the single file's, or that of a split set without numbers."""
    split = parse_split_name(plan.files[0].name)
    return f"{split[0]}.gguf" if split and len(plan.files) > 1 else plan.files[0].name


def _make_directory(directory: Path, may_make: bool) -> None:
    if directory.is_dir():
        return
    if not may_make:
        raise OutputError(f"there is no folder {directory}", "make it, or choose another --outfile")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder {directory}: {error.strerror}", "choose another --outdir, or make it by hand"
        ) from None


def _settings(choices: Choices, imatrix: Imatrix | None) -> dict[str, str]:
    """The choices that were made, by flag name, for the journal's messages and the manifest."""
    pairs = {
        "--quant": choices.quant,
        "--split-max-size": choices.split_max_size,
        "--name": choices.name,
        "--imatrix": imatrix.sha256 if imatrix else None,
        "--tensor-type": ", ".join(f"{pattern}={qtype.name}" for pattern, qtype in choices.tensor_types),
        "--output-tensor-type": choices.output_type.name if choices.output_type is not None else None,
        "--token-embedding-type": choices.embedding_type.name if choices.embedding_type is not None else None,
        "--override-kv": ", ".join(
            f"{o.key}={o.kind}:{str(o.value).lower() if o.kind == 'bool' else o.value}" for o in choices.overrides
        ),
        "--encoder": choices.encoder,
    }
    return {flag: str(value) for flag, value in pairs.items() if value}
