"""Errors that a user can act on, shared by every floor of the house."""

from __future__ import annotations


class KimiGgufError(Exception):
    """A fault of input, disk or state.

    Args:
        message: one sentence naming the file, the tensor and the numbers involved.
        hint: what to do next, or None when the message already says it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class InputError(KimiGgufError):
    """A checkpoint, GGUF, imatrix or recipe that cannot be used as it is."""


class ValueFault(InputError):
    """A value met while streaming that no output may contain (NaN scale, non-finite weight).

    Args:
        row: row of the array handed in that holds the value, when known; the caller knows which tensor that is.
    """

    def __init__(self, message: str, hint: str | None = None, row: int | None = None) -> None:
        super().__init__(message, hint)
        self.row = row


class OutputError(KimiGgufError):
    """A place that cannot be written as it is: full, in use by another process, or holding something else."""


class UsageError(KimiGgufError):
    """The command or its parameters make no sense together."""

    exit_code = 2


class BelowBar(KimiGgufError):
    """A verification ran to its end and its result is below the bar that the user set."""

    exit_code = 3
