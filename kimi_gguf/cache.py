"""Where things that can be made again are kept: the runtime, downloads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = "KIMI_GGUF_CACHE"


def cache_folder() -> Path:
    """The cache folder: ``$KIMI_GGUF_CACHE``, else the platform's own; it need not exist yet."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kimi-gguf"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kimi-gguf"
