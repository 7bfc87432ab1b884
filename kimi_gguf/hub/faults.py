"""What went wrong at the Hub, in one line that holds no secret: no token, no signature of an address."""

from __future__ import annotations

import re

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quant.errors import InputError

_TOKEN = re.compile(r"\bhf_\w{6,}")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]*")
_LONGEST = 300
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class NoRepository(InputError):
    """There is no such repository, or it is hidden from this user."""


class NoRevision(InputError):
    """The repository has no such branch, tag or commit."""


class Unreachable(InputError):
    """No connection to the Hub came about: refused, no such host, no route."""


class Transient(Exception):
    """A failure that another try may not meet.

    Attributes:
        reason: in one line.
        wait: seconds that the Hub asked for.
        unreachable: no connection came about.
    """

    def __init__(self, reason: str, wait: float | None = None, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        self.unreachable = unreachable


def scrub(text: str) -> str:
    """``text`` in one line, without tokens and without the query parts of addresses."""
    token = get_token()
    if token:
        text = text.replace(token, "***")
    line = " ".join(_QUERY.sub(r"\1", _TOKEN.sub("***", text)).split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."


def transport_fault(error: httpx2.TransportError) -> Transient:
    """A broken connection as something to try again."""
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    unreachable = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
    return Transient(f"{kind}: {scrub(str(error))}" if str(error) else kind, unreachable=unreachable)


def offline_fault(what: str) -> InputError:
    return InputError(
        f"{what} is not in the local cache, and offline mode is on (HF_HUB_OFFLINE)",
        "unset HF_HUB_OFFLINE, or fetch it first with `hf download`, and name the folder or file that it prints",
    )


def refusal(error: HfHubHTTPError | OfflineModeIsEnabled, repo: str, what: str = "") -> InputError:
    """The Hub's answer to a request for ``what`` of ``repo`` as an error with the next step."""
    subject = f"{repo}/{what}" if what else repo
    if isinstance(error, OfflineModeIsEnabled):
        return offline_fault(subject)
    status = error.response.status_code
    reason = scrub(error.response.headers.get("X-Error-Message") or error.server_message or "") or "no reason given"
    message = f"{subject}: the Hub answers {status}: {reason}"
    if isinstance(error, GatedRepoError):
        return InputError(message, f"ask for access at {constants.ENDPOINT}/{repo}, then {LOG_IN}")
    if isinstance(error, RepositoryNotFoundError):
        return NoRepository(message, f"check the name; if the repository is private, {LOG_IN}")
    if isinstance(error, RevisionNotFoundError):
        return NoRevision(
            message, f"name a branch, tag or commit that is listed at {constants.ENDPOINT}/{repo}/commits"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return InputError(message, f"see the files at {constants.ENDPOINT}/{repo}/tree/main")
    if status in (401, 403):
        return InputError(message, f"check what the token may do; {LOG_IN}")
    return InputError(message)
