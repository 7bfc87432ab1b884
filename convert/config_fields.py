"""Typed, bounded access to the members of a config file; every fault names the file, the key and what was found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quant.errors import InputError

# Sizes go into 32-bit metadata keys.
MAX_SIZE = (1 << 31) - 1
_REAL_LIMIT = 1e30
_SMALLEST_REAL = 1e-30
_HINT = "config.json must be the one that came with these shards"


class Fields:
    """Members of one JSON object, or of two that together describe one thing.

    Args:
        file: for messages.
        where: name of the object for messages, "" for the file's own top level.
        members: the object.
        also: a second object that may hold a member instead; one held by both must be equal.
    """

    def __init__(
        self, file: str, where: str, members: Mapping[str, Any], also: Mapping[str, Any] | None = None
    ) -> None:
        self.file = file
        self.where = where
        self.members = members
        self.also = also or {}

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        place = f"{self.file}: {self.where}: " if self.where else f"{self.file}: "
        raise InputError(place + message, hint or _HINT)

    def find(self, *names: str) -> tuple[str, Any]:
        """The first of ``names`` that is present and not null, with its value; (first name, None) without one."""
        for name in names:
            ours, theirs = self.members.get(name), self.also.get(name)
            if ours is not None and theirs is not None and ours != theirs:
                self.fail(
                    f"{name} is {ours!r:.80} and, at the top level, {theirs!r:.80}", "make the two equal, or remove one"
                )
            value = theirs if ours is None else ours
            if value is not None:
                return name, value
        return names[0], None

    def size(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> int:
        """A required whole number from ``low`` to ``high``."""
        value = self.optional_size(*names, low=low, high=high)
        if value is None:
            self.fail(f"{names[0]} is missing")
        return value

    def optional_size(self, *names: str, low: int = 0, high: int = MAX_SIZE) -> int | None:
        """A whole number from ``low`` to ``high``, None when absent."""
        name, value = self.find(*names)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            self.fail(f"{name} is {value!r:.80}, expected a whole number from {low} to {high}")
        return value

    def real(self, *names: str) -> float:
        """A required number above zero."""
        name, value = self.find(*names)
        if value is None:
            self.fail(f"{name} is missing")
        return self._number(name, value, positive=True)

    def optional_real(self, *names: str, positive: bool = False) -> float | None:
        """Any finite number, or any above zero; None when absent."""
        name, value = self.find(*names)
        return None if value is None else self._number(name, value, positive=positive)

    def _number(self, name: str, value: Any, *, positive: bool) -> float:
        if type(value) not in (int, float) or not abs(value) < _REAL_LIMIT or not math.isfinite(value):
            self.fail(f"{name} is {value!r:.80}, expected a finite number")
        # Below this a float32 has no digits left, or is zero.
        if positive and value < _SMALLEST_REAL:
            self.fail(f"{name} is {value!r:.80}, expected a number above 0")
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """True or false; required when there is no ``default``."""
        name, value = self.find(*names)
        if value is None:
            value = default
        if value is None:
            self.fail(f"{name} is missing")
        if not isinstance(value, bool):
            self.fail(f"{name} is {value!r:.80}, expected true or false")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of ``allowed``."""
        value = self.find(name)[1]
        value = default if value is None else value
        if value is None:
            self.fail(f"{name} is missing")
        if value not in allowed:
            self.fail(f"{name} is {value!r:.80}, expected {' or '.join(allowed)}")
        return str(value)

    def numbers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A required list of different whole numbers from ``low`` to ``high``, in its own order."""
        value = self.find(name)[1]
        if not isinstance(value, list):
            self.fail(f"{name} is {'missing' if value is None else f'{value!r:.80}, expected a list of numbers'}")
        for item in value:
            if type(item) is not int or not low <= item <= high:
                self.fail(f"{name} holds {item!r:.80}, expected whole numbers from {low} to {high}")
        if len(set(value)) != len(value):
            self.fail(f"{name} holds {Counter(value).most_common(1)[0][0]} twice")
        return tuple(value)

    def section(self, name: str) -> Fields:
        """The object ``name``, required."""
        value = self.find(name)[1]
        if not isinstance(value, dict):
            self.fail(f"{name} is {'missing' if value is None else f'{value!r:.80}, expected an object'}")
        return Fields(self.file, f"{self.where}.{name}" if self.where else name, value)
