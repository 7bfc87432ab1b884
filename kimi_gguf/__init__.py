"""Kimi K3 and K3.1 Pro checkpoints to GGUF.

>>> from kimi_gguf import convert, inspect, plan
>>> convert("Kimi-K3.1-Pro", quant="MXFP4", outdir="out")  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from convert.version import VERSION as __version__

if TYPE_CHECKING:
    from kimi_gguf.api import convert, inspect, plan

__all__ = ["__version__", "convert", "inspect", "plan"]


def __getattr__(name: str) -> Any:
    # The functions pull in numpy and all floors below; `--help` should not wait for them.
    if name in ("convert", "inspect", "plan"):
        return getattr(import_module("kimi_gguf.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
