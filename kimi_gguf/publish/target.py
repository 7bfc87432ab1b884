"""A branch of a repository that is written: bytes first, file by file, then small commits, each of them looked for.

The library uploads a file's bytes before a commit names it, and does not send bytes that the Hub has already. So a
file is tried again by itself, and a run that was killed sends only what is missing. A commit may succeed though its
answer is lost: before every try the branch is looked at, and what is there already is not committed again. The commit
names its parent, so that two writers cannot undo each other's work.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars

from convert.version import VERSION
from kimi_gguf.hub.address import HubAddress
from kimi_gguf.hub.faults import NoRepository, NoRevision, Transient, refusal, scrub, transport_fault
from kimi_gguf.hub.repository import HubFile, Repository, open_repository
from kimi_gguf.hub.retry import Note, Patience
from kimi_gguf.hub.transport import PATIENT_TRIES, check_status, silent
from quant.errors import InputError, KimiGgufError

MOST_FILES_PER_COMMIT = 50
SECONDS_BETWEEN_COMMITS = 30.0
LARGEST_FILE = 500 * 10**9
ADVISED_FILE = 200 * 10**9
MAIN = "main"
_CONFLICT = 412


@dataclass(frozen=True, slots=True)
class Upload:
    """A file for the Hub.

    Attributes:
        path: in the repository.
        content: a file on disk, or the bytes of a small one.
        nbytes: its size.
        sha256: that it must have; None when it is not known before the upload reads it.
    """

    path: str
    content: Path | bytes
    nbytes: int
    sha256: str | None


Operation = CommitOperationAdd | Upload


def small(path: str, data: bytes) -> Upload:
    """An upload of bytes that are at hand."""
    return Upload(path, data, len(data), hashlib.sha256(data).hexdigest())


def is_there(held: HubFile | None, upload: Upload) -> bool | None:
    """Whether the Hub holds this very file; None when that takes hashing it first."""
    if held is None or held.nbytes != upload.nbytes:
        return False
    if held.sha256 is not None:
        return None if upload.sha256 is None else held.sha256 == upload.sha256
    digest = held.digest()
    digest.update(upload.content if isinstance(upload.content, bytes) else upload.content.read_bytes())
    return bool(digest.hexdigest() == held.blob_id)


class Target:
    """Writes to one branch of one repository; not to be used from several threads at once.

    Args:
        repo: ``owner/name``.
        branch: None is the default branch.
        stop: set to call waits off.
        note: told of waits and of what has been done.
    """

    def __init__(self, repo: str, branch: str | None = None, *, stop: Event | None = None, note: Note = silent) -> None:
        self.repo = repo
        self.branch = branch or MAIN
        self.stop = stop or Event()
        self.note = note
        self._api = HfApi(library_name="kimi-gguf", library_version=VERSION)
        self._last_commit = 0.0
        disable_progress_bars()

    def look(self) -> Repository:
        """The branch as it is now.

        Raises:
            InputError: it is not there, may not be seen, or the Hub cannot be reached.
        """
        if constants.is_offline_mode():
            raise self._offline()
        return open_repository(HubAddress(self.repo, self.branch), stop=self.stop, note=self.note)

    def create(self, *, private: bool) -> Repository:
        """The branch as it is now, made first where it is missing.

        Raises:
            InputError: it cannot be made; or it should be private, and is there for all to see.
        """
        patience = self._patience("")
        while (there := self.existing()) is None:
            try:
                self._api.create_repo(self.repo, private=private, exist_ok=True)
                if self.branch != MAIN:
                    self._api.create_branch(self.repo, branch=self.branch, exist_ok=True)
            except Exception as error:
                patience.failed(self._sorted(error, ""))
        if private:
            self.check_private(there)
        return there

    def check_private(self, there: Repository) -> None:
        """Refuse to put into a public repository what is meant to be private.

        Raises:
            InputError: it is public.
        """
        if there.private is False:
            raise InputError(
                f"{self.repo} is there and is public; --private makes only a new repository private",
                "make it private in its settings on the Hub, or drop --private",
            )

    def check_card(self, card: Upload) -> None:
        """Have the Hub read the front matter of a model card, before anything is uploaded for it.

        Raises:
            InputError: what it objects to.
        """
        text = card.content.decode() if isinstance(card.content, bytes) else ""
        patience = self._patience(card.path)
        while True:
            try:
                ModelCard(text).validate(repo_type="model")
                return
            except ValueError as error:
                raise InputError(
                    f"{self.repo}/{card.path}: the Hub objects: {_objections(str(error))}",
                    "repair the front matter of the one that is there by hand",
                ) from None
            except Exception as error:
                patience.failed(self._sorted(error, card.path))

    def existing(self) -> Repository | None:
        """The branch as it is now; None when there is no such repository or branch."""
        try:
            return self.look()
        except (NoRepository, NoRevision):
            return None

    def send(self, uploads: Sequence[Upload], message: str, sent: Callable[[Upload], None] = lambda u: None) -> None:
        """Upload files and commit them, in as many commits as the Hub's limits ask for.

        Args:
            message: title of the commits.
            sent: called with each file that the Hub holds, committed and its hash confirmed.

        Raises:
            InputError: the Hub refuses, fails too often, or holds other bytes than were sent.
        """
        held = self.look()
        batch: list[CommitOperationAdd] = []
        waiting: list[Upload] = []
        # Time runs from the start, so that the first file of a long job does not get a commit of its own in vain.
        self._last_commit = self._last_commit or time.monotonic()
        for number, upload in enumerate(uploads):
            waiting.append(upload)
            if not is_there(held.files.get(upload.path), upload):
                batch.append(self.upload(upload))
            last = number + 1 == len(uploads)
            due = time.monotonic() - self._last_commit >= SECONDS_BETWEEN_COMMITS
            if last or due or len(batch) >= MOST_FILES_PER_COMMIT:
                held = self.commit(_always(batch), message) if batch else held
                for done in waiting:
                    sent(done)
                batch, waiting = [], []

    def upload(self, upload: Upload) -> CommitOperationAdd:
        """Have a file's bytes on the Hub, not yet in a commit."""
        patience = self._patience(upload.path)
        while True:
            add = _operation(upload)
            try:
                self._api.preupload_lfs_files(self.repo, [add], revision=self.branch, free_memory=False)
                break
            except Exception as error:
                patience.failed(self._sorted(error, upload.path))
        # Known since the upload read the file; a small one that waits for its commit is read here.
        found = add.upload_info.sha256.hex()
        if add.upload_info.size != upload.nbytes or found != (upload.sha256 or found):
            raise InputError(
                f"{upload.path}: has {add.upload_info.size} bytes with SHA-256 {found}; its manifest says "
                f"{upload.nbytes} with {upload.sha256}",
                "the file has changed or is damaged: convert it again; nothing of it was published",
            )
        return add

    def commit(
        self, make: Callable[[Repository], Iterable[Operation]], message: str, remove: Sequence[str] = ()
    ) -> Repository:
        """Have files in the branch: one commit, which is looked for before it is tried again.

        Args:
            make: the files, whose bytes are on the Hub or at hand; asked again whenever the branch has moved.
            remove: paths that go.

        Returns:
            the branch with the commit, hashes checked.

        Raises:
            InputError: the Hub refuses, fails too often, or holds other bytes than were sent.
        """
        done = False
        patience = self._patience(self.branch)
        while True:
            state = self.look()
            adds = [_operation(a) if isinstance(a, Upload) else a for a in make(state)]
            left = [add for add in adds if not _holds(state, add)]
            gone = [CommitOperationDelete(path) for path in remove if path in state.files]
            if not left and not gone:
                self._last_commit = time.monotonic()
                return state
            if done and left:
                raise _wrong_hash(self.repo, state, left[0])
            try:
                self._api.create_commit(
                    self.repo, [*left, *gone], commit_message=message, revision=self.branch, parent_commit=state.commit
                )
                done = True
            except Exception as error:
                patience.failed(self._sorted(error, "", commit=True))

    def _offline(self) -> InputError:
        return InputError(f"{self.repo}: offline mode is on (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE to publish")

    def _patience(self, what: str) -> Patience:
        return Patience(f"{self.repo}/{what}", PATIENT_TRIES, self.stop, self.note)

    def _sorted(self, error: Exception, what: str, *, commit: bool = False) -> Transient:
        """A failure of the library that may pass.

        Raises:
            InputError: it will not pass.
        """
        if isinstance(error, KimiGgufError | TypeError | AttributeError | LookupError):
            raise error
        if isinstance(error, ValueError):
            # What the library itself objects to, and the Hub's objections to a model card.
            raise InputError(f"{self.repo}/{what}: {scrub(str(error))}") from None
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OfflineModeIsEnabled):
                raise self._offline() from None
            if isinstance(cause, HfHubHTTPError):
                if commit and cause.response.status_code == _CONFLICT:
                    return Transient("somebody else has committed meanwhile")
                try:
                    check_status(cause.response, self.repo, what)
                except Transient as fault:
                    return fault
                raise refusal(cause, self.repo, what) from None
            if isinstance(cause, httpx2.TransportError):
                return transport_fault(cause)
            if isinstance(cause, OSError) and cause.filename:
                raise InputError(f"cannot read {cause.filename}: {cause.strerror}", "the rest can be published later")
            cause = cause.__cause__
        return Transient(f"{type(error).__name__}: {scrub(str(error))}")


def _objections(text: str) -> str:
    """What the Hub objects to in a card, as sentences."""
    try:
        return "; ".join(scrub(str(found["message"])) for found in json.loads(text)["errors"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return scrub(text)


def _always(adds: Sequence[CommitOperationAdd]) -> Callable[[Repository], Sequence[CommitOperationAdd]]:
    return lambda _: adds


def _operation(upload: Upload) -> CommitOperationAdd:
    content = upload.content if isinstance(upload.content, bytes) else str(upload.content)
    try:
        return CommitOperationAdd(upload.path, content)
    except (OSError, ValueError) as error:
        raise InputError(f"{upload.content!s:.200} cannot be read: {error}", "name files that are there") from None


def _holds(state: Repository, add: CommitOperationAdd) -> bool:
    """Whether a commit has the file of an operation, by hash."""
    file = state.files.get(add.path_in_repo)
    if file is None or file.nbytes != add.upload_info.size:
        return False
    if file.sha256 is not None:
        return bool(file.sha256 == add.upload_info.sha256.hex())
    digest = file.digest()
    with add.as_file() as opened:
        digest.update(opened.read())
    return bool(digest.hexdigest() == file.blob_id)


def _wrong_hash(repo: str, state: Repository, add: CommitOperationAdd) -> InputError:
    file = state.files.get(add.path_in_repo)
    return InputError(
        f"{repo}/{add.path_in_repo}: the Hub holds {file.hash if file else 'nothing'}, "
        f"{add.upload_info.sha256.hex()} was sent",
        "the same command uploads it again; the local file is kept",
    )
