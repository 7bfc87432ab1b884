"""The console's bar for work of named stages and counted steps, such as building the runtime."""

from __future__ import annotations

import sys
from typing import Any, Self

from tqdm import tqdm

from kimi_gguf.console import Console


class StageBar:
    """Shows stages as notes and the steps of a stage as a bar; a context manager that clears the bar.

    Where stderr is no terminal every tenth of a stage is a note; in JSON and quiet mode nothing is shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._bar: Any = None
        self._tenth = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def stage(self, name: str) -> None:
        """A stage begins."""
        self._clear()
        self._name = name
        self._tenth = 0
        self._console.note(name)

    def step(self, done: int, total: int) -> None:
        """So many of the stage's steps are done."""
        if self._console.mode != "human":
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = tqdm(desc=self._name, total=total, leave=False, file=sys.stderr)
            self._bar.update(done - self._bar.n)
        elif done * 10 // total > self._tenth:
            self._tenth = done * 10 // total
            self._console.note(f"{self._name}: {done} of {total}")

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
