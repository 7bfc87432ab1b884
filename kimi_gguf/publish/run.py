"""The function behind the verb ``publish``; its parameters are named as the flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_gguf.hub.address import HubAddress, parse_address
from kimi_gguf.hub.faults import NoRepository, NoRevision
from kimi_gguf.hub.repository import Repository
from kimi_gguf.publish.catalog import readme, stale_paths, with_published
from kimi_gguf.publish.facts import QuantFacts, evaluated, facts_of
from kimi_gguf.publish.gate import check_required, read_required
from kimi_gguf.publish.local import EVAL, IMATRIX, Bundle, gather
from kimi_gguf.publish.lock import upload_lock
from kimi_gguf.publish.removal import send_all_away
from kimi_gguf.publish.target import MOST_FILES_PER_COMMIT, Target, Upload, is_there, small
from quant.errors import InputError, UsageError

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class PlannedUpload:
    """One file of a publication; ``state`` is new, changed, or there."""

    path: str
    nbytes: int
    sha256: str | None
    state: str


@dataclass(frozen=True, slots=True)
class Publication:
    """What a publication did, or would do.

    Attributes:
        address: of the branch.
        exists: whether the branch was there before.
        commit: that holds everything; None after a dry run.
        files: in the order in which they are uploaded.
        readme: the model card.
        commits: how many the uploads need at most.
        warnings: sentences.
    """

    address: str
    exists: bool
    commit: str | None
    files: tuple[PlannedUpload, ...]
    readme: str
    commits: int
    warnings: tuple[str, ...]

    @property
    def upload_bytes(self) -> int:
        """Bytes that the Hub does not list yet."""
        return sum(file.nbytes for file in self.files if file.state != "there")

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "kimi-gguf publish",
            "address": self.address,
            "exists": self.exists,
            "commit": self.commit,
            "upload_bytes": self.upload_bytes,
            "commits": self.commits,
            "files": [{"path": f.path, "bytes": f.nbytes, "sha256": f.sha256, "state": f.state} for f in self.files],
            "readme": self.readme,
            "warnings": list(self.warnings),
        }


def publish_model(
    paths: Sequence[PathLike] | PathLike,
    repo: str,
    *,
    private: bool = False,
    create: bool = False,
    revision: str | None = None,
    as_you_go: bool = False,
    require: PathLike | None = None,
    dry_run: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Publication:
    """Publish GGUF files with their manifest, eval reports and a model card.

    Files go up one by one and are committed in batches; what the Hub has already is not sent again, so the same call
    continues what was interrupted.

    Args:
        paths: folders and files: models, manifests, eval reports, an importance matrix.
        repo: ``owner/name`` or ``hf://owner/name@branch``.
        private: a repository that is created is private.
        create: make the repository, and the branch, where they are missing.
        revision: branch; ``main`` by default.
        as_you_go: each GGUF file is committed by itself, and removed here once the Hub lists its hash. Nothing else is
            ever removed. Files that an earlier such call has removed need not be here.
        require: eval report that must be about these very files and hold its bars.
        dry_run: find out everything and write nothing.
        note: told of waits, and of files that are done.

    Raises:
        UsageError: nothing to publish, or no repository.
        InputError: a file that cannot be published, or the Hub refuses, or holds other bytes than were sent.
        BelowBar: the required report is missing, about other bytes, or below its bars.
        OutputError: another process uploads there.
    """
    if private and not create:
        raise UsageError("--private is about a repository that is made", "give --create too, or drop it")
    address = repository_address(repo, revision)
    required = None if require is None else read_required(require)
    bundle = gather([paths] if isinstance(paths, str | os.PathLike) else paths, as_you_go=as_you_go)
    if required is not None:
        if not bundle.models:
            raise UsageError("--require is about models, and there is none", "name the folder with the GGUF files")
        reports = [*bundle.reports, (Path(os.fspath(require or "")), required)]
        bundle = replace(bundle, reports=tuple(reports))
        check_required(required, [model.facts for model in bundle.models], os.fspath(require or ""))
    target = Target(address.repo, address.revision, note=note)
    if dry_run:
        there = target.existing() if create else _must_exist(target)
        if private and there:
            target.check_private(there)
        uploads, quants = _uploads(bundle, there)
        return _publication(target, there, there, uploads, readme(address.repo, quants, there), bundle.warnings, None)
    with upload_lock(target.repo, target.branch):
        before = target.existing()
        there = target.create(private=private) if create else _must_exist(target)
        # The card is made before the uploads too: one that cannot be read is found out before terabytes are sent.
        uploads, quants = _uploads(bundle, there)
        for card in readme(target.repo, quants, there):
            target.check_card(card)
        rest = uploads
        if as_you_go:
            files = [upload for model in bundle.models for upload in model.files()]
            send_all_away(target, files, _message(bundle))
            rest = [upload for upload in uploads if upload not in files]
        target.send(rest, _message(bundle), sent=lambda u: note(f"published: {u.path}"))

        def card_of(now: Repository) -> list[Upload]:
            return readme(target.repo, with_published(_ours(bundle, now)[0], now), now)

        replaced = stale_paths(there, [model.facts for model in bundle.models], {upload.path for upload in uploads})
        after = target.commit(card_of, f"Model card: {_message(bundle)}", replaced)
        return _publication(target, before, there, uploads, card_of(after), bundle.warnings, after.commit)


def repository_address(repo: str, revision: str | None) -> HubAddress:
    """The branch that a command line names.

    Raises:
        UsageError: no repository, or two branches.
    """
    address = parse_address(repo)
    if address is None or address.path:
        raise UsageError(f"{repo} is no repository on the Hub", "write owner/name")
    if revision is not None and address.revision not in (None, revision):
        raise UsageError(f"{repo} and --revision {revision} name two branches", "drop one of them")
    return HubAddress(address.repo, revision or address.revision)


def _must_exist(target: Target) -> Repository:
    try:
        return target.look()
    except (NoRepository, NoRevision) as fault:
        raise type(fault)(
            fault.message, "give --create to make it" + (f"; else {fault.hint}" if fault.hint else "")
        ) from None


def _ours(bundle: Bundle, there: Repository | None) -> tuple[list[QuantFacts], list[Upload]]:
    """Facts of all quants that the bundle says something about, and the uploads of its reports.

    Raises:
        InputError: a report that is about nothing here.
    """
    local = {m.facts.quant: (m.facts, m.stem) for m in bundle.models}
    known = with_published([facts for facts, _ in local.values()], there)
    documents = [document for _, document in bundle.reports]
    uploads: dict[str, Upload] = {}
    for path, document in bundle.reports:
        about = next((q for q in known if evaluated(document, q.files)), None)
        if about is None:
            raise InputError(
                f"{path} is about other files than those that are published",
                "evaluate these files, or publish the report together with its own",
            )
        stem = local[about.quant][1] if about.quant in local else _stem(about)
        uploads.setdefault(f"{about.quant}/{stem}{EVAL}", small(f"{about.quant}/{stem}{EVAL}", path.read_bytes()))
    quants = [
        facts_of(q.document, [*documents, *([q.report] if q.report else [])])
        for q in known
        if q.quant in local or any(evaluated(d, q.files) for d in documents)
    ]
    return quants, list(uploads.values())


def _stem(quant: QuantFacts) -> str:
    name = quant.files[0].name.removesuffix(".gguf")
    return name.rpartition("-of-")[0].rpartition("-")[0] if "-of-" in name else name


def _uploads(bundle: Bundle, there: Repository | None) -> tuple[list[Upload], list[QuantFacts]]:
    """Everything but the card, and the quants that the card will list."""
    ours, reports = _ours(bundle, there)
    uploads = [upload for model in bundle.models for upload in model.uploads()]
    if bundle.imatrix is not None:
        uploads.append(Upload(IMATRIX, bundle.imatrix, bundle.imatrix.stat().st_size, None))
    return [*uploads, *reports], with_published(ours, there)


def _message(bundle: Bundle) -> str:
    names = ", ".join(model.facts.quant for model in bundle.models)
    return f"{names} by kimi-gguf" if names else "Eval reports and importance matrix by kimi-gguf"


def _publication(
    target: Target,
    before: Repository | None,
    there: Repository | None,
    uploads: Sequence[Upload],
    card: Sequence[Upload],
    warnings: Sequence[str],
    commit: str | None,
) -> Publication:
    held = there.files if there else {}
    planned = []
    for upload in [*uploads, *card]:
        file = held.get(upload.path)
        same = is_there(file, upload) if before else False
        state = "there" if same else "changed" if file and before else "new"
        planned.append(PlannedUpload(upload.path, upload.nbytes, upload.sha256, state))
    new = sum(file.state != "there" for file in planned)
    content = b"".join(upload.content for upload in card if isinstance(upload.content, bytes))
    return Publication(
        str(HubAddress(target.repo, target.branch)),
        before is not None,
        commit,
        tuple(planned),
        content.decode(),
        # One for each batch, at worst for each large file, and the card's.
        max(-(-new // MOST_FILES_PER_COMMIT), sum(isinstance(u.content, Path) for u in uploads)) + 1,
        tuple(warnings),
    )
