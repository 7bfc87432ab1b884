"""What is checked of flags before a long run starts: where its result goes, and how much memory it may take."""

from __future__ import annotations

import os
from pathlib import Path

from convert.flags import parse_size
from quant.errors import UsageError


def check_outfile(path: Path) -> None:
    """Refuse a result that could not be written once it is there.

    Raises:
        UsageError: no such folder, a folder in its place, or no right to write there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", "make it first, or name another place")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"no right to write in {path.parent}", "name another place")


def parse_memory(text: str | int) -> int:
    """Bytes of ``--memory``: a number, or one with K, M, G or T.

    Raises:
        UsageError: another spelling, or nothing.
    """
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"--memory {text} is no amount of memory", "write bytes, or 20G for 20e9") from error
