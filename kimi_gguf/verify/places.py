"""What is checked of flags before a long run starts: where its result goes, and how much memory it may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from convert.flags import parse_size
from quant.errors import InputError, UsageError
from quant.imatrix_file import read_index

_HEAD_BYTES = 4096


def check_outfile(path: Path, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Refuse a result that could not be written once it is there, or that would replace a file of another kind.

    Args:
        kind: what the result is, for the message.
        is_kind: whether the file that is there holds an earlier result of that kind.

    Raises:
        UsageError: no such folder, a folder or a device in its place, a file of another kind, or no right to write.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file", "name another place")
    if path.exists() and path.stat().st_size and not is_kind(path):
        raise UsageError(f"{path} is there already, and is no {kind}", "name another place, or remove it first")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", "make it first, or name another place")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"no right to write in {path.parent}", "name another place")


def is_imatrix(path: Path) -> bool:
    """Whether the file at ``path`` holds an importance matrix."""
    try:
        read_index(path)
    except InputError:
        return False
    return True


def begins_with(*signs: bytes) -> Callable[[Path], bool]:
    """A test of files: whether each of ``signs`` is in the beginning."""

    def test(path: Path) -> bool:
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            return False
        return all(sign in head for sign in signs)

    return test


def parse_memory(text: str | int) -> int:
    """Bytes of ``--memory``: a number, or one with K, M, G or T.

    Raises:
        UsageError: another spelling, or nothing.
    """
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"--memory {text} is no amount of memory", "write bytes, or 20G for 20e9") from error
