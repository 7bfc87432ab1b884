"""What a runtime records about itself, in ``runtime.json`` of its folder."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quant.errors import InputError

FACTS_FILE = "runtime.json"


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """How a runtime was made.

    Attributes:
        digest: SHA-256 over source archive and patches.
        commit: llama.cpp's commit.
        bindings: version of the ``llama_cpp`` package.
        needs_no_patch: first upstream build that knows kimi-k31.
        patches: file names of the patches.
        backends: ``cpu``, ``rpc`` and what was chosen.
        rpc_protocol: major, minor, patch; client and worker must agree on the major number.
        cmake_args: options given by the user.
        programs: file names of the programs.
        seconds: how long the build took.
    """

    digest: str
    commit: str
    bindings: str
    needs_no_patch: str
    patches: tuple[str, ...]
    backends: tuple[str, ...]
    rpc_protocol: tuple[int, int, int]
    cmake_args: tuple[str, ...]
    programs: tuple[str, ...]
    seconds: float


def write_facts(folder: Path, facts: RuntimeFacts) -> None:
    """Write ``runtime.json`` into ``folder``; its presence says that the folder is complete."""
    (folder / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> RuntimeFacts:
    """Read ``runtime.json``.

    Raises:
        InputError: it is damaged.
    """
    path = folder / FACTS_FILE
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        return RuntimeFacts(**(table | lists))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", f"remove {folder} and build again: kimi-gguf runtime build"
        ) from None


def rpc_protocol(source: Path) -> tuple[int, int, int]:
    """Version of the RPC protocol that llama.cpp's headers in ``source`` state.

    Raises:
        InputError: the header does not state it.
    """
    header = source / "ggml" / "include" / "ggml-rpc.h"
    text = header.read_text(encoding="utf-8")
    found = dict(re.findall(r"#define RPC_PROTO_(MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text))
    try:
        return int(found["MAJOR"]), int(found["MINOR"]), int(found["PATCH"])
    except KeyError as error:
        raise InputError(f"{header.name} does not state the RPC protocol's {error} version") from None
