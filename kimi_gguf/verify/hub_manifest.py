"""What the manifest beside a published GGUF claims, against what the Hub lists and the checkpoint says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from convert.domain import Source
from convert.output import MANIFEST
from kimi_gguf.hub.repository import Repository
from quant.gguf_split import GgufSet

_LARGEST = 1 << 28


def manifest_faults(repository: Repository, files: GgufSet, source: Source) -> Iterator[str]:
    """Claims that do not hold: hashes of files and shards, the checkpoint's commit, the types of tensors."""
    document = _manifest(repository, files)
    if document is None:
        return
    try:
        claimed = {str(file["name"]): file.get("sha256") for file in document["files"]}
        types = {str(tensor["name"]): str(tensor["type"]) for tensor in document["tensors"]}
        origin = document["source"]
        shards = {str(shard["name"]): shard for shard in origin["shards"]}
    except (KeyError, TypeError, AttributeError):
        yield "the manifest is damaged"
        return
    for path in files.paths:
        listed = repository.files[path.as_posix()].sha256
        if claimed.get(path.name) != listed:
            yield f"{path.name}: the manifest says SHA-256 {claimed.get(path.name)}, the Hub lists {listed}"
    for tensor in files.tensors:
        if types.get(tensor.name) != tensor.qtype.name:
            yield f"{tensor.name} is {tensor.qtype.name}, the manifest says {types.get(tensor.name)}"
    if origin.get("revision") and source.revision and origin["revision"] != source.revision:
        yield f"the manifest names commit {origin['revision']} of the checkpoint, compared is {source.revision}"
    for shard in source.shards:
        there = shards.get(shard.name)
        said = (shard.nbytes, shard.header_sha256)
        if there is None or (there.get("bytes"), there.get("header_sha256")) != said:
            yield f"{shard.name} is not the shard that the manifest names"
        elif shard.sha256 and there.get("sha256") not in (None, shard.sha256):
            yield f"{shard.name}: the manifest says SHA-256 {there['sha256']}, the checkpoint's is {shard.sha256}"


def _manifest(repository: Repository, files: GgufSet) -> dict[str, Any] | None:
    """The manifest in the model's folder that names its first file."""
    folder = PurePosixPath(files.paths[0].parent.as_posix())
    for path, file in repository.files.items():
        if path.endswith(MANIFEST) and PurePosixPath(path).parent == folder and file.nbytes <= _LARGEST:
            try:
                document = json.loads(repository.read_whole(path))
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict) and files.paths[0].name in str(document.get("files")):
                return document
    return None
