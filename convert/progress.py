"""What a running conversion tells the one who started it; nothing below this prints."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from convert.domain import Plan


class Progress(Protocol):
    """Receives a conversion's progress. All methods but ``planned`` may be called from several threads."""

    def measured(self, done: int, total: int) -> None:
        """Before a plan for a target size: so many of the tensors have been measured."""

    def planned(self, plan: Plan, resumed_units: int, resumed_bytes: int) -> None:
        """Work on ``plan`` begins; so much of its tensor data is there from an earlier run."""

    def wrote(self, nbytes: int) -> None:
        """So many more bytes of tensor data have been written."""

    def checked(self, nbytes: int) -> None:
        """So many more bytes have been read back."""

    def finished(self, path: Path) -> None:
        """A file is complete, checked, and has its final name."""


class Silent:
    """Ignores all progress."""

    def measured(self, done: int, total: int) -> None: ...

    def planned(self, plan: Plan, resumed_units: int, resumed_bytes: int) -> None: ...

    def wrote(self, nbytes: int) -> None: ...

    def checked(self, nbytes: int) -> None: ...

    def finished(self, path: Path) -> None: ...
