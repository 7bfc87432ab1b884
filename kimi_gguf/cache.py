"""Where things that can be made again are kept: the runtime, downloads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from quant.errors import UsageError

ENVIRONMENT = "KIMI_GGUF_CACHE"


def cache_folder() -> Path:
    """The cache folder: ``$KIMI_GGUF_CACHE``, else the platform's own; it need not exist yet.

    Raises:
        UsageError: neither is known, since this user has no home.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        return in_home(named).absolute()
    if sys.platform == "darwin":
        return in_home("~/Library/Caches/kimi-gguf")
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else in_home("~/.cache")) / "kimi-gguf"


def in_home(path: str) -> Path:
    """``path`` with the home folder in place of ``~``.

    Raises:
        UsageError: the user has none, as in a container that runs under a number alone.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            "this user has no home folder: HOME is not set",
            f"set HOME, or {ENVIRONMENT} to a folder that can be written",
        ) from None
