"""The bounded part of GGUF reading: a position in bytes that come in ranges, and string arrays kept as bytes."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from quant.errors import InputError

Read = Callable[[int, int], bytes]

MAX_STRINGS = 1 << 21
MAX_HEADER_BYTES = 1 << 28

_LARGEST_READ = 1 << 23
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def decode_text(data: bytes) -> str:
    """UTF-8 as far as it goes; other bytes become visible escapes."""
    return data.decode("utf-8", errors="backslashreplace")


class StringArray(Sequence[str]):
    """The strings of one GGUF array, decoded when asked for.

    Args:
        data: the array as it lies in the file: per string a u64 length and its bytes.
        ends: for each string, the offset in ``data`` behind its last byte.
    """

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: array[int]) -> None:
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, index: int) -> bytes:
        """The bytes of string ``index`` as the file holds them."""
        begin = self._ends[index - 1] if index else 0
        return self._data[begin + 8 : self._ends[index]]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [decode_text(self.raw(i)) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return decode_text(self.raw(index % len(self)))

    def __iter__(self) -> Iterator[str]:
        return (decode_text(self.raw(i)) for i in range(len(self)))

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


class Cursor:
    """A position in the header and a window of bytes around it."""

    def __init__(self, read: Read, size: int, file: str, first_read: int) -> None:
        self._read = read
        self.size = size
        self._chunk = max(1, first_read)
        self._buffer = b""
        self._base = 0
        self._kept: int | None = None
        self.file = file
        self.position = 0
        self.strings = 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def fault(self, what: str, hint: str = "the file is damaged, or no GGUF of a model; get it again") -> InputError:
        return InputError(f"{self.file}: {what}", hint)

    def _require(self, n: int, what: str) -> int:
        """Make the next ``n`` bytes present; returns where they start in the window."""
        start = self.position - self._base
        if start + n <= len(self._buffer):
            return start
        if n > self.left:
            raise self.fault(
                f"{what} needs {n} bytes at offset {self.position}, but the file ends at {self.size}",
                "the file is cut short or damaged; get it again",
            )
        if self.position + n > MAX_HEADER_BYTES:
            raise self.fault(f"{what} would make the header larger than {MAX_HEADER_BYTES} bytes")
        keep = self.position if self._kept is None else self._kept
        tail = self._buffer[keep - self._base :]
        have = keep + len(tail)
        # A kept array doubles the window, so that copying stays linear in its length.
        end = min(self.size, max(self.position + n, have + max(self._chunk, len(tail))))
        self._chunk = min(2 * self._chunk, _LARGEST_READ)
        data = self._read(have, end - have)
        if len(data) != end - have:
            raise self.fault(f"{len(data)} bytes came at offset {have} where {end - have} were asked for")
        self._buffer = tail + data if tail else data
        self._base = keep
        return self.position - self._base

    def take(self, n: int, what: str) -> bytes:
        start = self._require(n, what)
        self.position += n
        return self._buffer[start : start + n]

    def u32(self, what: str) -> int:
        start = self._require(4, what)
        self.position += 4
        return int(_U32.unpack_from(self._buffer, start)[0])

    def u64(self, what: str) -> int:
        start = self._require(8, what)
        self.position += 8
        return int(_U64.unpack_from(self._buffer, start)[0])

    def string(self, what: str) -> bytes:
        return self.take(self.u64(what), what)

    def string_array(self, count: int, what: str) -> StringArray:
        self.strings += count
        if count > self.left // 8 or self.strings > MAX_STRINGS:
            raise self.fault(
                f"{what} claims {count} strings; {self.left} bytes are left, {MAX_STRINGS} strings allowed"
            )
        ends = array("q")
        first = self._kept = self.position
        try:
            for _ in range(count):
                start = self._require(8, what)
                length = _U64.unpack_from(self._buffer, start)[0]
                self._require(8 + length, what)
                self.position += 8 + length
                ends.append(self.position - first)
            begin = first - self._base
            return StringArray(self._buffer[begin : begin + self.position - first], ends)
        finally:
            self._kept = None
