"""The manifest beside an output: what it was made from, how, and the hashes of what was made.

The only place for times and paths. Sources are named by pattern, so that the release's half a million tensors take
a few thousand lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from convert.domain import Plan, PlannedTensor, Shard, Source
from convert.journal import FileRecord
from convert.plan import Checkpoint
from convert.transforms import row_count, source_names
from convert.version import VERSION

FORMAT = 1


def manifest_bytes(
    checkpoint: Checkpoint,
    plan: Plan,
    settings: Mapping[str, str],
    records: Mapping[int, FileRecord],
    *,
    imatrix_sha256: str | None,
) -> bytes:
    """The manifest of a finished conversion as JSON.

    Args:
        settings: the choices that were made, by flag name.
        records: hashes of every file and tensor, by file index.
        imatrix_sha256: of the importance matrix, if one was used.
    """
    source = checkpoint.source
    hashes = [digest for index in range(len(plan.files)) for digest in records[index].tensors]
    document = {
        "format": FORMAT,
        "tool": {"name": "kimi-gguf", "version": VERSION},
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "architecture": plan.arch,
        "quant": plan.recipe,
        "encoder": plan.encoder,
        "settings": dict(settings),
        "imatrix_sha256": imatrix_sha256,
        "plan_sha256": plan.digest,
        "source": {
            "name": source.label,
            "origin": source.origin,
            "revision": source.revision,
            "config_sha256": checkpoint.config_sha256,
            "shards": [_shard(shard) for shard in source.shards],
            "left_out": {"tensors": len(plan.left_out), "bytes": sum(t.nbytes for t in plan.left_out)},
        },
        "files": [
            {"name": file.name, "bytes": file.nbytes, "sha256": records[index].sha256}
            for index, file in enumerate(plan.files)
        ],
        "tensors": [_tensor(t, digest, source) for t, digest in zip(plan.tensors, hashes, strict=True)],
        "warnings": list(plan.warnings),
    }
    return _compact_lists(document)


def _shard(shard: Shard) -> dict[str, Any]:
    entry = {"name": shard.name, "bytes": shard.nbytes, "header_sha256": shard.header_sha256}
    return entry | {"sha256": shard.sha256} if shard.sha256 else entry


def _tensor(tensor: PlannedTensor, digest: str, source: Source) -> dict[str, Any]:
    spec = tensor.spec
    shards = {source.tensors[name].shard for name in source_names(spec, 0, row_count(spec))}
    entry = {
        "name": spec.name,
        "shape": list(spec.shape),
        "type": tensor.qtype.name,
        "bytes": tensor.nbytes,
        "sha256": digest,
        "file": tensor.file,
        "sources": list(spec.sources),
        "shards": sorted(shards),
    }
    if spec.experts:
        entry["experts"] = spec.experts
    if tensor.reason:
        entry |= {"recipe_type": tensor.recipe_type.name, "reason": tensor.reason}
    return entry


def _compact_lists(document: Mapping[str, Any]) -> bytes:
    """JSON with one line per key, and one per element of a list of objects: small, and still fit for diff."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join("  " + _compact(item) for item in value) + "\n ]"
        else:
            text = _compact(value)
        lines.append(f" {json.dumps(key)}: {text}")
    # Folders may have names that are no text; their bytes become the escapes that JSON has for them.
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode(errors="backslashreplace")


def _compact(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, separators=(", ", ": "), ensure_ascii=False)
