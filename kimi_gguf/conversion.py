"""The function behind the verb ``convert``: a checkpoint from a folder or from the Hub."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from convert import pipeline
from convert.domain import ConvertResult, Plan, Source
from convert.flags import PathLike, parse_size
from convert.source import LocalSource
from kimi_gguf.outlet import opened_outlet
from kimi_gguf.sources import resolve_source
from quant.errors import OutputError

if TYPE_CHECKING:
    from kimi_gguf.hub.budget import ShardNeed


@runtime_checkable
class FetchingSource(Protocol):
    """A source whose shards take disk while they are in use."""

    def need(self, plan: Plan, output: int | None = None) -> ShardNeed: ...
    def check_disk(self, plan: Plan, directory: Path, output: int | None = None) -> ShardNeed: ...
    def claim(self) -> None: ...
    def finished(self) -> None: ...
    def close(self) -> None: ...


def convert(
    src: PathLike | Source | None = None,
    *,
    outfile: PathLike | None = None,
    outdir: PathLike | None = None,
    dry_run: bool = False,
    max_disk: str | int | None = None,
    keep_shards: bool = False,
    download_dir: PathLike | None = None,
    publish: str | None = None,
    as_you_go: bool = False,
    create: bool = False,
    private: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_need: Callable[[Source, ShardNeed], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
    fetched: Callable[[int], object] = lambda nbytes: None,
    **flags: Any,
) -> ConvertResult:
    """Convert a checkpoint to GGUF, or continue a conversion that was interrupted.

    Args:
        src: folder of the checkpoint, repository on the Hub (``owner/name@revision``, ``hf://owner/name``), or any
            ``Source``; None is the current folder.
        max_disk: bytes, as ``200G``, that output and shards may take together.
        keep_shards: shards that were fetched stay.
        download_dir: folder for them; ``NAME.shards`` beside the output by default.
        publish: repository ``owner/name`` that the result is published in.
        as_you_go: each file is published when it is complete, and removed; there are no files in the result then.
        create, private: make the repository to publish in, where it is missing.
        on_need: called, after ``on_plan``, with a source that fetches shards and what they need on disk.
        note: told of waits for the Hub.
        fetched: told, from any thread, how many bytes of shards came.
        others: as ``convert.pipeline.convert``.

    Raises:
        as ``convert.pipeline.convert``; InputError also when the Hub refuses or cannot be reached.
    """
    directory = Path(outdir or ".") if outfile is None else Path(outfile).parent
    limit = None if max_disk is None else parse_size(max_disk)
    source = resolve_source(
        src,
        download_dir=Path(download_dir) if download_dir is not None else None,
        beside=directory,
        max_disk=limit,
        keep_shards=keep_shards,
        note=note,
        fetched=fetched,
    )

    if not isinstance(source, FetchingSource) and (keep_shards or download_dir is not None):
        note(f"{source.origin} is here already: nothing is fetched, so --keep-shards and --download-dir do nothing")
    with ExitStack() as stack:
        if source is not src and isinstance(source, LocalSource):
            stack.callback(source.close)
        outlet = stack.enter_context(opened_outlet(publish, as_you_go, create, private, dry_run, source, flags, note))

        def check(plan: Plan) -> None:
            if on_plan:
                on_plan(plan)
            need = None
            if outlet.delivery:
                outlet.claim(plan, directory, limit)
                need = source.need(plan, 0) if isinstance(source, FetchingSource) else None
            elif isinstance(source, FetchingSource):
                need = source.need(plan) if dry_run else source.check_disk(plan, directory)
            elif limit is not None and plan.nbytes > limit:
                raise OutputError(
                    f"--max-disk {limit:,} is less than the {plan.nbytes:,} bytes of the output",
                    "give more, choose a smaller --quant, or publish --as-you-go",
                )
            if on_need and need is not None:
                on_need(source, need)
            if isinstance(source, FetchingSource) and need is not None and need.total and not dry_run:
                # Before there is any output.
                source.claim()

        result = outlet.run(
            lambda taken, delivery: pipeline.convert(
                taken, outfile=outfile, outdir=outdir, dry_run=dry_run, on_plan=check, delivery=delivery, **flags
            )
        )
        if not dry_run and isinstance(source, FetchingSource):
            source.finished()
        return result
