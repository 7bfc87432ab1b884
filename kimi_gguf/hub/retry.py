"""Patience with the Hub: tries again after growing waits, or after as long as the Hub asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event

from huggingface_hub.utils import parse_ratelimit_headers

from kimi_gguf.hub.faults import Transient, Unreachable
from quant.errors import InputError

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
# A full window of the Hub's rate limits has five minutes.
LONGEST_ASKED_WAIT = 1800.0

Note = Callable[[str], None]


class Stopped(Exception):
    """The work was called off from another thread."""


class Patience:
    """Counts the failures of one piece of work, and waits between them.

    Args:
        subject: what is being done, for messages.
        tries: failures in a row that are too many; progress sets the count back.
        stop: set to call the work off.
        note: told of every wait.
    """

    def __init__(self, subject: str, tries: int, stop: Event, note: Note) -> None:
        self._subject = subject
        self._tries = tries
        self._stop = stop
        self._note = note
        self._failures = 0

    def progressed(self) -> None:
        self._failures = 0

    def failed(self, fault: Transient) -> None:
        """Wait before the next try.

        Raises:
            InputError: it has failed too often, as ``Unreachable`` when no connection came about at last; or the Hub
                asks for too long a wait.
            Stopped: called off while waiting.
        """
        self._failures += 1
        if self._failures >= self._tries:
            kind = Unreachable if fault.unreachable else InputError
            raise kind(
                f"{self._subject}: failed {self._failures} times in a row, at last: {fault.reason}",
                "check the connection; the same command continues where it stopped",
            ) from None
        if fault.wait is not None and fault.wait > LONGEST_ASKED_WAIT:
            raise InputError(
                f"{self._subject}: {fault.reason}; the Hub asks to wait {fault.wait:.0f} seconds",
                "the same command, given later, continues where it stopped",
            ) from None
        backoff = min(FIRST_WAIT * 2 ** (self._failures - 1), LONGEST_WAIT) * random.uniform(0.8, 1.2)
        wait = backoff if fault.wait is None else max(fault.wait, FIRST_WAIT)
        self._note(f"{self._subject}: {fault.reason}; next try in {wait:.0f} s")
        if self._stop.wait(wait):
            raise Stopped


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait: ``Retry-After`` in either form, or the Hub's rate limit headers."""
    text = headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text)
    if text:
        try:
            return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
        except (TypeError, ValueError):
            return None
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None
