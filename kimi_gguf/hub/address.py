"""What a user means by ``owner/name``, ``owner/name@revision`` or ``hf://owner/name@revision/path``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from huggingface_hub.errors import HfUriError
from huggingface_hub.utils import parse_hf_uri

from quant.errors import UsageError

SCHEME = "hf://"
_WEB = ("https://huggingface.co/", "https://hf.co/")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@.+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A model repository on the Hub, a revision of it, a path in it.

    Attributes:
        repo: ``owner/name``.
        revision: branch, tag or commit; None is the default branch.
        path: of a file or folder, empty for all of the repository.
    """

    repo: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.repo}{revision}" + (f"/{self.path}" if self.path else "")


def is_address(text: str) -> bool:
    """Whether ``text`` can only mean something on the Hub."""
    return text.startswith((SCHEME, *_WEB))


def parse_address(text: str) -> HubAddress | None:
    """The address that ``text`` spells; None when it is none.

    Raises:
        UsageError: it begins as one and is not well formed, or names no model repository.
    """
    if not is_address(text):
        if not _NAME.fullmatch(text):
            return None
        text = SCHEME + text
    try:
        found = parse_hf_uri(text)
    except HfUriError as error:
        reason = " ".join(str(error.msg).split())
        raise UsageError(
            f"{text} is not an address on the Hub: {reason}", f"write {SCHEME}owner/name@revision"
        ) from None
    if found.type != "model":
        raise UsageError(f"{text} is a {found.type}, not a model repository", f"write {SCHEME}owner/name@revision")
    return HubAddress(found.id, found.revision, found.path_in_repo)
