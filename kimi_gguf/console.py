"""The one place that prints: results on stdout, everything else on stderr, in human, JSON or quiet form.

human   results as text and tables; notes, warnings and progress bars on stderr
json    one object on stdout and nothing else, errors too
quiet   only the essential lines of a result; warnings and errors stay on stderr
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from tqdm import tqdm

from quant.errors import KimiGgufError, OutputError

if TYPE_CHECKING:
    from convert.domain import Plan

Mode = Literal["human", "json", "quiet"]

# Names come from files of others: what a terminal would obey becomes visible text.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)}


class LostOutput(OutputError):
    """Standard output cannot be written: its reader has left (``unheard``), or the disk that it goes to is full."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(
            f"the result cannot be written to standard output: {reason.strerror or reason}", "send it somewhere else"
        )
        self.unheard = isinstance(reason, BrokenPipeError)


class _Terminal:
    """stderr as bars write to it: a terminal that is gone does not end the work."""

    def write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
        except OSError:
            _silence(sys.stderr)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            _silence(sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


TERMINAL: Any = _Terminal()


class Console:
    """Where a verb's result goes.

    Args:
        mode: human, json or quiet.
        yes: answer every question with yes.
    """

    def __init__(self, mode: Mode = "human", *, yes: bool = False) -> None:
        self.mode = mode
        self.yes = yes
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure:
                reconfigure(errors="backslashreplace")

    def result(self, value: dict[str, Any], human: str, quiet: str = "") -> None:
        """The outcome of a verb in the form that the mode asks for; empty texts print nothing."""
        if self.mode == "json":
            _write(sys.stdout, json.dumps(value, ensure_ascii=False))
        else:
            text = human if self.mode == "human" else quiet
            if text:
                _write(sys.stdout, visible(text))

    def note(self, text: str) -> None:
        """Something worth knowing while a verb works."""
        if self.mode == "human":
            _write(sys.stderr, visible(text))

    def warnings(self, texts: Iterable[str]) -> None:
        """Warnings; in JSON they are part of the result instead."""
        if self.mode != "json":
            for text in texts:
                _write(sys.stderr, visible(f"warning: {text}"))

    def error(self, message: str, hint: str | None, exit_code: int) -> None:
        """A failure: one message and the next step."""
        if self.mode == "json":
            error = {"error": message, "hint": hint, "exit_code": exit_code}
            _write(sys.stdout, json.dumps(error, ensure_ascii=False))
        else:
            _write(sys.stderr, visible(f"error: {message}" + (f"\n  {hint}" if hint else "")))

    def fault(self, fault: KimiGgufError) -> None:
        """A fault of input, disk or use."""
        self.error(fault.message, fault.hint, fault.exit_code)

    @property
    def attended(self) -> bool:
        """Whether somebody can answer a question."""
        return self.mode == "human" and bool(sys.stdin and sys.stdin.isatty())

    def confirm(self, question: str, *, default: bool = True) -> bool:
        """Ask; yes without asking where nobody can answer, since the command was given in full knowledge.

        Args:
            default: what an empty answer means.
        """
        if self.yes or not self.attended:
            return True
        sys.stderr.write(visible(f"{question} [{'Y/n' if default else 'y/N'}] "))
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer:
            return False
        return answer.strip().lower() in ("y", "yes") if answer.strip() else default

    def stages(self) -> StageBar:
        """A bar for a run in stages (a ``verify.observations.Progress``); silent in JSON and quiet mode."""
        return StageBar(self)

    def progress(self) -> ConversionBars:
        """Bars of a conversion; silent in JSON and quiet mode, plain lines where stderr is no terminal."""
        return ConversionBars(self)


class StageBar:
    """Shows one stage of a long run at a time; plain lines where stderr is no terminal. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, stage: str, total: int) -> None:
        self._total = total
        if self._console.mode == "human" and sys.stderr.isatty():
            self._bar = tqdm(desc=stage, total=total, leave=False, file=TERMINAL)

    def step(self, done: int, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(visible(text), refresh=False)
            self._bar.update(done - self._bar.n)
        elif done < self._total:
            self._console.note(f"{done} of {self._total}: {text}")


class ConversionBars:
    """Shows a conversion's progress (a ``convert.progress.Progress``); a context manager that clears its bars."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = Lock()
        self._bars: dict[str, Any] = {}
        self._measuring: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for bar in (*self._bars.values(), *([self._measuring] if self._measuring is not None else [])):
            bar.close()

    def measured(self, done: int, total: int) -> None:
        if self._console.mode == "human" and sys.stderr.isatty():
            if self._measuring is None:
                self._measuring = tqdm(desc="measure", total=total, unit="tensor", leave=False, file=TERMINAL)
            self._measuring.update(done - self._measuring.n)
            if done == total:
                self._measuring.close()
        elif done == 1:
            self._console.note(f"measuring types on a sample of {total:,} tensors")

    def planned(self, plan: Plan, resumed_units: int, resumed_bytes: int) -> None:
        if resumed_units:
            self._console.note(f"continuing: {resumed_bytes:,} bytes of tensor data are there already")
        if self._console.mode == "human" and sys.stderr.isatty():
            total = sum(tensor.nbytes for tensor in plan.tensors)
            self._bars = {
                "wrote": _bar("write", 0, total, resumed_bytes),
                "checked": _bar("check", 1, plan.nbytes, 0),
            }

    def fetching(self, nbytes: int) -> None:
        """So many bytes of shards are to come."""
        if self._bars:
            self._bars["fetched"] = _bar("fetch", 2, nbytes, 0)

    def fetched(self, nbytes: int) -> None:
        self._advance("fetched", nbytes)

    def wrote(self, nbytes: int) -> None:
        self._advance("wrote", nbytes)

    def checked(self, nbytes: int) -> None:
        self._advance("checked", nbytes)

    def finished(self, path: Path) -> None:
        with self._lock:
            if self._bars:
                tqdm.write(visible(f"done: {path}"), file=TERMINAL)
            else:
                self._console.note(f"done: {path}")

    def _advance(self, name: str, nbytes: int) -> None:
        if name in self._bars:
            with self._lock:
                self._bars[name].update(nbytes)


def _bar(label: str, position: int, total: int, initial: int) -> Any:
    return tqdm(
        desc=label,
        total=total,
        initial=initial,
        position=position,
        unit="B",
        unit_scale=True,
        leave=False,
        file=TERMINAL,
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned text: numbers to the right, words to the left; a column whose name begins with ``>`` holds numbers."""
    cells = [[column.lstrip(">") for column in columns], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        aligned = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def visible(text: str) -> str:
    """``text`` with control and direction characters written out, line ends and tabs kept."""
    return text.translate(_VISIBLE)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError as error:
        _silence(stream)
        # What is only told on the way must not end the work.
        if stream is sys.stdout:
            raise LostOutput(error) from None


def _silence(stream: TextIO) -> None:
    """Point a stream that fails at the null device: Python would try again, and complain, when it closes it at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
