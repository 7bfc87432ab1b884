"""What becomes of a conversion's files: they stay, are published at the end, or are published as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from convert.delivery import Delivery
from convert.domain import ConvertResult, Plan, Source
from quant.errors import UsageError

if TYPE_CHECKING:
    from kimi_gguf.publish.as_you_go import AsYouGo
    from kimi_gguf.publish.room import RoomySource

Convert = Callable[[Source, Delivery | None], ConvertResult]


class Outlet:
    """Files stay."""

    delivery: AsYouGo | None = None

    def __init__(self, source: Source) -> None:
        self.source = source

    def claim(self, plan: Plan, directory: Path, max_disk: int | None) -> None:
        """Check and reserve room on disk, where that is the outlet's affair."""

    def run(self, convert: Convert) -> ConvertResult:
        """Run a conversion."""
        return convert(self.source, None)


class PublishAtEnd(Outlet):
    """Files stay, and are published too."""

    def __init__(self, source: Source, publish: Callable[[ConvertResult], str]) -> None:
        super().__init__(source)
        self._publish = publish

    def run(self, convert: Convert) -> ConvertResult:
        result = convert(self.source, None)
        return replace(result, notes=(*result.notes, self._publish(result))) if result.files else result


class PublishAsYouGo(Outlet):
    """Files go as they are made."""

    def __init__(self, source: RoomySource, delivery: AsYouGo, address: str) -> None:
        super().__init__(source)
        self.roomy = source
        self.delivery = delivery
        self._address = address

    def claim(self, plan: Plan, directory: Path, max_disk: int | None) -> None:
        from kimi_gguf.publish.as_you_go import set_stem
        from kimi_gguf.publish.room import claim_room

        set_stem(plan)
        claim_room(plan, self.roomy.inner, self.roomy.budget, directory, max_disk)

    def run(self, convert: Convert) -> ConvertResult:
        from kimi_gguf.hub.retry import Stopped

        try:
            result = convert(self.source, self.delivery)
        except Stopped:
            # The conversion was called off because publishing has failed: that is what the user must hear.
            if self.delivery is not None and self.delivery.failure is not None:
                raise self.delivery.failure from None
            raise
        return replace(result, notes=(*result.notes, f"published: {self._address}"))


@contextmanager
def opened_outlet(
    repo: str | None,
    as_you_go: bool,
    create: bool,
    private: bool,
    dry_run: bool,
    source: Source,
    flags: Mapping[str, Any],
    note: Callable[[str], None],
) -> Iterator[Outlet]:
    """The outlet that the flags of ``convert`` ask for; whoever publishes as files are made holds the upload's lock.

    Raises:
        UsageError: flags that make no sense together.
        InputError: there is no such repository, or a public one that should be private.
        OutputError: another process uploads there.
    """
    if repo is None:
        if as_you_go or create or private:
            raise UsageError("--as-you-go, --create and --private are about publishing", "give --publish owner/name")
        yield Outlet(source)
        return
    if private and not create:
        raise UsageError("--private is about a repository that is made", "give --create too, or drop it")
    # The Hub's client takes a while to load, and most commands do without it.
    from kimi_gguf.hub.budget import DiskBudget
    from kimi_gguf.hub.faults import NoRepository, NoRevision
    from kimi_gguf.hub.source import HubSource
    from kimi_gguf.publish.as_you_go import AsYouGo
    from kimi_gguf.publish.lock import upload_lock
    from kimi_gguf.publish.room import RoomySource
    from kimi_gguf.publish.run import publish_model, repository_address
    from kimi_gguf.publish.target import Target

    address = repository_address(repo, None)
    stop = source.repository.transport.stop if isinstance(source, HubSource) else Event()
    target = Target(address.repo, address.revision, stop=stop, note=note)
    if not create:
        # Before days of work, not after.
        try:
            target.look()
        except (NoRepository, NoRevision) as fault:
            raise type(fault)(fault.message, f"give --create to make it; else {fault.hint}") from None
    elif private and (there := target.existing()) is not None:
        target.check_private(there)
    imatrix = flags.get("imatrix")
    if not as_you_go:

        def publish(result: ConvertResult) -> str:
            more = [] if imatrix is None else [imatrix]
            paths = [*result.files[:1], *more]
            return f"published: {publish_model(paths, repo, create=create, private=private, note=note).address}"

        yield PublishAtEnd(source, publish)
        return
    budget = source.budget if isinstance(source, HubSource) else DiskBudget(stop)
    roomy = RoomySource(source, budget, stop)
    delivery = AsYouGo(
        target,
        roomy,
        stop,
        create=create,
        private=private,
        overwrite=bool(flags.get("overwrite")),
        imatrix=None if imatrix is None else Path(imatrix),
    )
    with nullcontext() if dry_run else upload_lock(target.repo, target.branch):
        yield PublishAsYouGo(roomy, delivery, f"hf://{target.repo}@{target.branch}")
