"""Opens whatever holds weights: a checkpoint folder or a GGUF."""

from __future__ import annotations

from pathlib import Path

from kimi_gguf.reference.checkpoint_store import open_checkpoint
from kimi_gguf.reference.gguf_store import GgufStore
from kimi_gguf.reference.weights import WeightStore


def open_store(path: Path) -> WeightStore:
    """The weights at ``path``: a folder is a checkpoint, a file is a GGUF or one file of a split set.

    Raises:
        InputError: neither.
    """
    return open_checkpoint(path) if path.is_dir() else GgufStore(path)
