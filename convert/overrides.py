"""``--override-kv KEY=TYPE:VALUE``: llama.cpp's spelling of metadata set by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from convert.gguf_file import MetadataEntry, ValueType, value_bytes
from quant.errors import UsageError

_SPELLING = "write KEY=TYPE:VALUE with TYPE int, float, bool or str"
_INTEGERS = frozenset(
    {
        ValueType.UINT8,
        ValueType.INT8,
        ValueType.UINT16,
        ValueType.INT16,
        ValueType.UINT32,
        ValueType.INT32,
        ValueType.UINT64,
        ValueType.INT64,
    }
)
_FITTING = {
    "int": _INTEGERS,
    "float": frozenset({ValueType.FLOAT32, ValueType.FLOAT64}),
    "bool": frozenset({ValueType.BOOL}),
    "str": frozenset({ValueType.STRING}),
}
# What the writer itself decides; another value would make the file contradict its own layout.
_KEY = re.compile(r"[\w-]{1,200}(\.[\w-]{1,200}){0,20}", re.ASCII)
_FIXED = ("general.alignment", "general.architecture", "split.")


@dataclass(frozen=True, slots=True)
class Override:
    """One metadata value set by hand; ``kind`` is int, float, bool or str."""

    key: str
    kind: str
    value: int | float | bool | str


def parse_override(text: str) -> Override:
    """Read ``KEY=TYPE:VALUE``.

    Raises:
        UsageError: another spelling, or a value that is not of its type.
    """
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not (key and equals and colon) or kind not in _PARSERS:
        raise UsageError(f"malformed override {text!r:.200}", _SPELLING)
    if not _KEY.fullmatch(key):
        raise UsageError(f"{key!a:.80} is no key", "keys are words of letters, digits, _ and -, joined by dots")
    try:
        return Override(key, kind, _PARSERS[kind](value))
    except (KeyError, ValueError):
        raise UsageError(f"override of {key}: {value!r} is not {kind}", _SPELLING) from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": _finite,
    "bool": {"true": True, "false": False}.__getitem__,
    "str": str,
}


def apply_overrides(entries: Sequence[MetadataEntry], overrides: Sequence[Override]) -> list[MetadataEntry]:
    """``entries`` with values replaced in place; a key that is not there yet is appended.

    An existing key keeps its type. A new one becomes UINT32 (INT32 when negative), FLOAT32, BOOL or STRING.

    Raises:
        UsageError: the key is an array, is decided by the writer, or the value does not fit its type.
    """
    result = list(entries)
    for override in overrides:
        if override.key.startswith(_FIXED):
            raise UsageError(f"{override.key} cannot be overridden: the layout of the file decides it", "leave it out")
        places = [i for i, entry in enumerate(result) if entry.key == override.key]
        entry = _typed(override, result[places[0]].type if places else None)
        value_bytes(entry)
        if places:
            result[places[0]] = entry
        else:
            result.append(entry)
    return result


def _typed(override: Override, existing: Any) -> MetadataEntry:
    if existing is None:
        negative = override.kind == "int" and isinstance(override.value, int) and override.value < 0
        new = {"int": ValueType.INT32 if negative else ValueType.UINT32, "float": ValueType.FLOAT32}
        existing = new.get(override.kind) or (ValueType.BOOL if override.kind == "bool" else ValueType.STRING)
    if existing not in _FITTING[override.kind]:
        raise UsageError(
            f"override of {override.key}: the key is {existing.name}, the value {override.kind}", _SPELLING
        )
    return MetadataEntry(override.key, existing, override.value)
