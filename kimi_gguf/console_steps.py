"""The console's bar for work of named stages and counted steps, such as building the runtime."""

from __future__ import annotations

import sys
from typing import Any, Self

from tqdm import tqdm

from kimi_gguf.console import TERMINAL, Console, visible


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
                self._bar = tqdm(desc=self._name, total=total, leave=False, file=TERMINAL)
            self._bar.update(done - self._bar.n)
        elif done * 10 // total > self._tenth:
            self._tenth = done * 10 // total
            self._console.note(f"{self._name}: {done} of {total}")

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class StatusLine:
    """Notes, and below them one line that says how things are; a context manager that clears it.

    Where stderr is no terminal, and in JSON and quiet mode, the line is not shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._line is not None:
            self._line.close()

    def note(self, text: str) -> None:
        """Something happened."""
        if self._line is not None:
            self._line.clear()
        self._console.note(text)

    def status(self, text: str) -> None:
        """How things are now."""
        if self._console.mode != "human" or not sys.stderr.isatty():
            return
        if self._line is None:
            self._line = tqdm(bar_format="{desc}", leave=False, file=TERMINAL)
        self._line.set_description_str(visible(text))
