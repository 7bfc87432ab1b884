"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_gguf.reference.checkpoint_maker import make_sparse_release


@pytest.fixture(scope="session")
def sparse_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K3.1 Pro as released: 96 true headers (75 MB) and the index over files without data. Read only."""
    return make_sparse_release(tmp_path_factory.mktemp("release") / "Kimi-K3.1-Pro")
