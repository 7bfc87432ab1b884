"""A repository at one commit: its files with the sizes and hashes that the Hub states."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from convert.version import VERSION
from kimi_gguf.hub.address import HubAddress
from kimi_gguf.hub.faults import Transient, refusal, transport_fault
from kimi_gguf.hub.retry import Note, Patience
from kimi_gguf.hub.transport import TRIES, Transport, check_status, silent
from quant.errors import InputError

WHOLE_TRIES = 3
CONTACT_TRIES = 3


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the Hub lists it: path, bytes, name of its git blob, SHA-256 when it is stored as a large file."""

    path: str
    nbytes: int
    blob_id: str
    sha256: str | None

    @property
    def hash(self) -> str:
        """What names this content: SHA-256, or the git blob's SHA-1."""
        return self.sha256 or self.blob_id

    def digest(self) -> Any:
        """A hash object that ends at ``hash`` when it is fed the content."""
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False)


class Repository:
    """Files of one commit; made by ``open_repository``.

    Attributes:
        address: as it was asked for.
        commit: that its revision stood for at that moment; everything is read from there.
        files: by path.
        transport: reads ranges of them.
        private: whether only some may see it; None when the Hub does not say.
    """

    def __init__(
        self,
        address: HubAddress,
        commit: str,
        files: Mapping[str, HubFile],
        transport: Transport,
        private: bool | None = None,
    ) -> None:
        self.address = address
        self.commit = commit
        self.files = files
        self.transport = transport
        self.private = private

    @property
    def origin(self) -> str:
        return str(HubAddress(self.address.repo, self.commit))

    def read(self, path: str, begin: int, length: int) -> bytes:
        """A range of a file, cut at its end."""
        file = self.files[path]
        end = min(begin + length, file.nbytes)
        cached = self.cached(file)
        if cached is None:
            return self.transport.read(path, begin, end, file.nbytes)
        with cached.open("rb") as opened:
            opened.seek(begin)
            return opened.read(max(end - begin, 0))

    def read_whole(self, path: str) -> bytes:
        """A small file, its hash checked.

        Raises:
            InputError: it cannot be had, or is not what the Hub lists.
        """
        file = self.files[path]
        for _ in range(WHOLE_TRIES):
            data = self.read(path, 0, file.nbytes)
            digest = file.digest()
            digest.update(data)
            if digest.hexdigest() == file.hash:
                return data
        raise wrong_bytes(self.address.repo, file, digest.hexdigest())

    def cached(self, file: HubFile) -> Path | None:
        """The file in the library's cache, when it is there whole; the cache is only read."""
        found = try_to_load_from_cache(self.address.repo, file.path, revision=self.commit)
        if not isinstance(found, str):
            return None
        path = Path(found)
        try:
            whole = path.stat().st_size == file.nbytes
        except OSError:
            return None
        # A blob of the cache carries the hash as its name; a copy, where links are not possible, carries none.
        return path if whole and (not path.is_symlink() or path.resolve().name == file.hash) else None


def wrong_bytes(repo: str, file: HubFile, found: str) -> InputError:
    """A file came with the hash ``found`` however often it was fetched."""
    return InputError(
        f"{repo}/{file.path}: came {WHOLE_TRIES} times with the wrong hash, at last {found}; the Hub lists {file.hash}",
        "look for a proxy or a disk that changes bytes; the same command continues where it stopped",
    )


def open_repository(
    address: HubAddress, *, stop: Event | None = None, note: Note = silent, first_contact: bool = False
) -> Repository:
    """Look a repository up, and pin its revision to the commit that it means now.

    Args:
        address: repository and revision.
        stop: set to call the work off.
        note: told of waits.
        first_contact: nothing has been asked of the Hub yet, so a connection that does not come about is given up soon.

    Raises:
        InputError: there is none, it may not be read, the revision is unknown, or the Hub cannot be reached; as
            ``Unreachable`` when no connection came about.
    """
    stop = stop or Event()
    patience = Patience(address.repo, TRIES, stop, note)
    contact = Patience(address.repo, CONTACT_TRIES if first_contact else TRIES, stop, note)
    api = HfApi(library_name="kimi-gguf", library_version=VERSION)
    while True:
        try:
            info = api.model_info(
                address.repo, revision=address.revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            )
            break
        except OfflineModeIsEnabled as error:
            raise refusal(error, address.repo) from None
        except HfHubHTTPError as error:
            try:
                check_status(error.response, address.repo)
            except Transient as fault:
                patience.failed(fault)
        except httpx2.UnsupportedProtocol:
            raise InputError(f"{constants.ENDPOINT} is not an address to reach the Hub at", "see HF_ENDPOINT") from None
        except httpx2.TransportError as error:
            found = transport_fault(error)
            (contact if found.unreachable else patience).failed(found)
    if info.sha is None:
        raise InputError(f"{address.repo}: the Hub names no commit for {address.revision or 'it'}")
    files = {}
    for sibling in info.siblings or ():
        if sibling.size is None or sibling.blob_id is None:
            raise InputError(f"{address.repo}/{sibling.rfilename}: the Hub states no size", "see HF_ENDPOINT")
        large = sibling.lfs
        files[sibling.rfilename] = HubFile(
            sibling.rfilename,
            large.size if large else sibling.size,
            sibling.blob_id,
            large.sha256 if large else None,
        )
    transport = Transport(address.repo, info.sha, stop=stop, note=note)
    return Repository(address, info.sha, files, transport, info.private)
