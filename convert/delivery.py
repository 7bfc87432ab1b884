"""Where finished files go when they do not stay: the contract of a conversion with the one who takes them away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from convert.domain import Plan
from convert.journal import FileRecord
from convert.units import UnitTable

ManifestOf = Callable[[Mapping[int, FileRecord]], bytes]
"""The manifest of a conversion of which these files are done, by index."""


class Delivery(Protocol):
    """Takes finished files of a conversion to another place, which proves by their hashes what it holds.

    Methods are called in the order in which they stand here; ``take`` from any thread, once for each file that is
    complete, checked, and not there yet. A file that has been taken is removed by the taker, when its place has it.
    """

    def begin(self, plan: Plan, manifest_of: ManifestOf) -> Mapping[int, FileRecord]:
        """The files that the place holds already, by index; these are not made again."""
        ...

    def started(self, plan: Plan, units: UnitTable, pending: Sequence[int], finished: Sequence[int]) -> None:
        """Work begins: units to do, and files that are complete on disk and still to be taken."""
        ...

    def take(self, index: int, path: Path, record: FileRecord) -> None:
        """A file is complete; may raise what has gone wrong with others."""
        ...

    def finish(self, manifest: bytes) -> None:
        """All files have been handed over: wait for them, then deliver the manifest of the whole."""
        ...

    def abandon(self) -> None:
        """The conversion ends without being finished."""
        ...
