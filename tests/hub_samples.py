"""Repositories, faults and clients for the tests of the Hub."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hub_environment import client_environment
from hub_server import Request
from shard_samples import write_shard_file

REPO = "org/Kimi-Tiny"
SHARD_BYTES = 300_000


def write_folder(folder: Path, shards: int = 3) -> Path:
    """A folder that looks like a checkpoint from outside: shards of random bytes, config, no model."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(7)
    for n in range(1, shards + 1):
        path = folder / f"model-{n:05d}-of-{shards:05d}.safetensors"
        write_shard_file(path, {f"t{n}": ("U8", [SHARD_BYTES], SHARD_BYTES)})
        with path.open("r+b") as file:
            file.seek(-SHARD_BYTES, 2)
            file.write(rng.integers(0, 256, SHARD_BYTES, dtype=np.uint8).tobytes())
    (folder / "config.json").write_text('{"of": "no model"}')
    return folder


def ranges(requests: Sequence[Request], name: str) -> list[tuple[int, int] | None]:
    """Ranges of a file that were asked of its storage, end exclusive; None for a request of all of it."""
    found: list[tuple[int, int] | None] = []
    for request in requests:
        if request.path.startswith("/cdn/") and request.path.endswith(f"/{name}"):
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "")
            found.append((int(match[1]), int(match[2]) + 1) if match else None)
    return found


def start_client(*arguments: object, endpoint: str, cwd: Path, token: str | None = None) -> subprocess.Popen[str]:
    """The command line in a process of its own, as a user of the Hub at ``endpoint``."""
    environment = client_environment(endpoint) | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    if token:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", "kimi_gguf", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def on_disk(*folders: Path) -> int:
    """Bytes of shards and output on disk, as ``du`` has them, holes not counted."""
    total = 0
    for path in (p for folder in folders for p in folder.glob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if path.name.endswith((".safetensors", ".part", ".gguf", ".partial")):
            total += min(status.st_size, status.st_blocks * 512)
    return total


def wait_for(condition: Callable[[], bool]) -> None:
    """Until ``condition`` holds; a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "never came to pass"
        time.sleep(0.005)


def start_server(root: Path, port: int, faults: Sequence[dict[str, Any]] = ()) -> subprocess.Popen[str]:
    """The test Hub in a process of its own, to be killed; it answers when this returns."""
    program = str(Path(__file__).with_name("hub_server.py"))
    command = [sys.executable, program, str(root), str(port), json.dumps(list(faults))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline()
    return server
