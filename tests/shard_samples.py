"""Builders of safetensors bytes, sound and unsound, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.domain import SourceTensor
from convert.safetensors_header import parse_header


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shard_bytes(header: Mapping[str, Any] | str | bytes, data: int = 0) -> bytes:
    """A safetensors file with this header (JSON text when not a mapping) and ``data`` zero bytes."""
    text = json.dumps(header) if isinstance(header, Mapping) else header
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def parse(content: bytes, name: str = "model-00001-of-000001.safetensors") -> list[SourceTensor]:
    return parse_header(lambda offset, length: content[offset : offset + length], name, len(content))[0]


def write_shard_file(path: Path, tensors: Mapping[str, tuple[str, list[int], int]]) -> None:
    """A sound shard of zeros: name -> (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = entry(dtype, shape, at, at + nbytes)
        at += nbytes
    path.write_bytes(shard_bytes(header, at))
