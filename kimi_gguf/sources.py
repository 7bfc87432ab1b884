"""Which checkpoint a command means."""

from __future__ import annotations

import os
from pathlib import Path

from convert.domain import Source
from convert.source import open_source
from quant.errors import UsageError

HOW_TO_NAME = (
    "name the folder that holds config.json and the safetensors shards, a download or a snapshot of the Hub's cache: "
    "kimi-gguf convert FOLDER --quant MXFP4"
)


def resolve_source(src: str | os.PathLike[str] | Source | None) -> Source:
    """Open the checkpoint that ``src`` names; None is the current folder when it holds one.

    Raises:
        UsageError: nothing is named and the current folder holds no checkpoint, or there is no such folder.
        InputError: the folder holds no sound checkpoint.
    """
    if src is None:
        here = Path.cwd()
        if not (here / "config.json").is_file():
            raise UsageError("no checkpoint is named, and the current folder holds none", HOW_TO_NAME)
        return open_source(here)
    if not isinstance(src, str | os.PathLike):
        return src
    if not Path(src).exists():
        raise UsageError(f"there is no folder {os.fspath(src)}", HOW_TO_NAME)
    return open_source(Path(src))
