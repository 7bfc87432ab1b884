"""The Hub that this test process talks to; imported by ``conftest.py`` before anything imports huggingface_hub."""

from __future__ import annotations

import os
import random
import socket
import tempfile


def free_port() -> int:
    """A port that nobody listens at, outside the range from which outgoing connections take theirs."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20_000, 32_000)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


PORT = free_port()
ENDPOINT = f"http://127.0.0.1:{PORT}"
HOME = tempfile.TemporaryDirectory(prefix="hf-home-")


def client_environment(endpoint: str = ENDPOINT) -> dict[str, str]:
    """Variables for a client of ``endpoint``: no xet, no tokens or caches of the one who runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "HUGGINGFACE_"))}
    return kept | {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HOME": HOME.name,
        "HF_HUB_ETAG_TIMEOUT": "3",
        "HF_HUB_DOWNLOAD_TIMEOUT": "3",
    }


variables = client_environment()
os.environ.clear()
os.environ.update(variables)
