"""JSON of files that nobody vouches for: every fault is an InputError, and memory stays near the text's own size.

``load_object`` reads small files whole. ``Cursor`` walks the two large ones (shard headers, index) member by member,
so that no text, however nested or repetitive, can build more than one member's worth of objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from quant.errors import InputError

MAX_DEPTH = 64
MAX_SMALL_FILE_BYTES = 32_000_000
AGAIN = "use the file as it came with the checkpoint: download it again"
_LONGEST_NUMBER = 4000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*+")
_STRING = re.compile(r'[ \t\r\n]*+"((?:[^"\\\x00-\x1f]++|\\.)*+)"')
_FLAT_OBJECT = re.compile(r"[ \t\r\n]*+(\{[^{}]{0,4096}\})")
_NESTING = re.compile(r'"(?:[^"\\]++|\\.)*+"|([\[{])|([\]}])')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{},]')


def decode_text(data: bytes, file: str) -> str:
    """UTF-8 text of ``data``.

    Raises:
        InputError: not UTF-8, the message gives the offset; or with a byte order mark, which JSON forbids.
    """
    if data.startswith(_BYTE_ORDER_MARK):
        raise InputError(f"{file}: begins with a byte order mark", "save it as UTF-8 without one, or download it again")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text (byte {error.start})", AGAIN) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"member {twice!r} occurs twice")
    return members


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _whole(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits, at most {_LONGEST_NUMBER} are read")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole)


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _NESTING.finditer(text):
        if match[1]:
            depth += 1
            deepest = max(deepest, depth)
        elif match[2]:
            depth -= 1
    return deepest


def load_object(data: bytes, file: str) -> dict[str, Any]:
    """The JSON object that ``data`` holds, for files that are small by nature.

    Raises:
        InputError: above 32 MB, not UTF-8, not JSON, nested deeper than 64, a member named twice, half of a
            surrogate pair, or not an object.
    """
    if len(data) > MAX_SMALL_FILE_BYTES:
        raise InputError(f"{file}: {len(data)} bytes of JSON, at most {MAX_SMALL_FILE_BYTES} are read", AGAIN)
    text = decode_text(data, file)
    depth = _depth(text)
    if depth > MAX_DEPTH:
        raise InputError(f"{file}: JSON nested {depth} deep, at most {MAX_DEPTH} is read", AGAIN)
    try:
        value = _DECODER.decode(text)
    except ValueError as error:
        raise InputError(f"{file}: {error}", AGAIN) from None
    if not isinstance(value, dict):
        raise InputError(f"{file}: holds a JSON {type(value).__name__}, expected an object", AGAIN)
    if _SURROGATE.search(text):
        _check_characters(value, file)
    return value


def _check_characters(value: object, file: str) -> None:
    """Refuse escapes that are no characters: no UTF-8 file, so no GGUF, can hold them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"{file}: {half} is half of a surrogate pair, not a character", AGAIN) from None


class Cursor:
    """A position in a JSON text that moves from member to member.

    Args:
        text: the JSON text.
        file: its file, for messages.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.at = 0

    def fail(self, message: str) -> NoReturn:
        raise InputError(f"{self.file}: {message}", AGAIN)

    def _peek(self) -> str:
        """The next character that is not white space ("" at the end); the cursor stands on it."""
        found = self.text[self.at : self.at + 1]
        if found and found in " \t\r\n":
            self.take(_SPACE)
            found = self.text[self.at : self.at + 1]
        return found

    def _symbol(self, allowed: str) -> str:
        found = self._peek()
        if not found or found not in allowed:
            self.fail(f"JSON is broken at character {self.at}: expected one of {allowed!r}, found {found!r}")
        self.at += 1
        return found

    def string(self) -> str:
        """The string at the cursor, escapes resolved."""
        match = self.take(_STRING)
        if match is None:
            self.fail(f"JSON is broken at character {self.at}: expected a string")
        token = match[1]
        if "\\" not in token:
            return token
        try:
            return str(json.loads(f'"{token}"'))
        except ValueError:
            self.fail(f"JSON is broken at character {match.start(1)}: bad escape in a string")

    def members(self) -> Iterator[str]:
        """Names of the object at the cursor; the caller moves past each value before taking the next name."""
        self._symbol("{")
        if self._peek() == "}":
            self.at += 1
            return
        while True:
            name = self.string()
            self._symbol(":")
            yield name
            if self._symbol(",}") == "}":
                return

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match of ``pattern`` at the cursor, which moves past it; None, and no move, without one."""
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def flat_object(self, what: str) -> dict[str, Any]:
        """The object without inner objects at the cursor, at most 4,098 characters."""
        match = self.take(_FLAT_OBJECT)
        if match is None:
            self.fail(f"{what} is not a short JSON object without inner objects")
        try:
            value: dict[str, Any] = _DECODER.decode(match[1])
        except RecursionError:
            self.fail(f"{what} is nested too deep")
        except ValueError as error:
            self.fail(f"{what}: {error}")
        return value

    def skip_value(self) -> None:
        """Moves past any value without building it; its inner syntax is not judged."""
        depth = 0
        for match in _STRUCTURE.finditer(self.text, self.at):
            token = match[0]
            if depth == 0 and token in ",}]":
                self.at = match.start()
                return
            depth += (token in "[{") - (token in "]}")
            if depth == 0 and token in "]}":
                self.at = match.end()
                return
        self.fail(f"JSON is broken at character {self.at}: a value without end")

    def finish(self) -> None:
        """Checks that nothing but white space follows."""
        if self._peek():
            self.fail(f"JSON is broken at character {self.at}: text after the end")
