"""The manifest beside an output: what it was made from, how, and the hashes of what was made.

The only place for times and paths. Sources are named by pattern, so that the release's half a million tensors take
a few thousand lines. It is also an in-toto statement (``_type``, ``subject``, ``predicate``) with SLSA's provenance as
its predicate; the keys around that say the same, and more, in our own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from convert.domain import Plan, PlannedTensor, Shard, Source
from convert.journal import FileRecord
from convert.model_card import ModelCard, read_model_card
from convert.model_config import ModelConfig
from convert.plan import Checkpoint
from convert.transforms import row_count, source_names
from convert.version import VERSION

FORMAT = 1
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD = "urn:kimi-gguf:convert:1"


def manifest_bytes(
    checkpoint: Checkpoint,
    plan: Plan,
    settings: Mapping[str, str],
    records: Mapping[int, FileRecord],
    *,
    imatrix_sha256: str | None,
) -> bytes:
    """The manifest of a conversion as JSON.

    Args:
        settings: the choices that were made, by flag name.
        records: hashes of files and of their tensors, by file index; ``complete`` is true when no file is missing.
        imatrix_sha256: of the importance matrix, if one was used.
    """
    source = checkpoint.source
    complete = len(records) == len(plan.files)
    document: dict[str, Any] = {
        "_type": _STATEMENT,
        "subject": [
            {"name": file.name, "digest": {"sha256": records[index].sha256}}
            for index, file in enumerate(plan.files)
            if index in records
        ],
        "predicateType": _PREDICATE,
        "predicate": _provenance(source, settings, imatrix_sha256),
        "format": FORMAT,
        "complete": complete,
        "tool": {"name": "kimi-gguf", "version": VERSION},
        "finished": datetime.now(UTC).isoformat(timespec="seconds") if complete else None,
        "model": _model(read_model_card(source)),
        "dimensions": _dimensions(checkpoint.config),
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
            {"name": file.name, "bytes": file.nbytes} | ({"sha256": records[index].sha256} if index in records else {})
            for index, file in enumerate(plan.files)
        ],
        "tensors": _tensors(plan, records, source),
        "warnings": list(plan.warnings),
    }
    return document_bytes(document)


def recorded_files(document: Mapping[str, Any]) -> dict[int, FileRecord]:
    """The hashes of files and tensors that a manifest states, by file index.

    Raises:
        KeyError, TypeError: it is no manifest of this format.
    """
    tensors: dict[int, list[str]] = {}
    for tensor in document["tensors"]:
        if "sha256" in tensor:
            tensors.setdefault(tensor["file"], []).append(tensor["sha256"])
    return {
        index: FileRecord(str(file["sha256"]), tuple(tensors.get(index, ())))
        for index, file in enumerate(document["files"])
        if "sha256" in file
    }


def _tensors(plan: Plan, records: Mapping[int, FileRecord], source: Source) -> list[dict[str, Any]]:
    hashes = {index: iter(record.tensors) for index, record in records.items()}
    return [_tensor(t, next(hashes[t.file]) if t.file in hashes else None, source) for t in plan.tensors]


def _provenance(source: Source, settings: Mapping[str, str], imatrix_sha256: str | None) -> dict[str, Any]:
    """SLSA's description of a build: what went in, and who did it."""
    inputs = [
        {"name": shard.name}
        | ({"uri": f"{source.origin}/{shard.name}"} if "://" in source.origin else {})
        | ({"digest": {"sha256": shard.sha256}} if shard.sha256 else {})
        for shard in source.shards
    ]
    if imatrix_sha256:
        inputs.append({"name": "imatrix", "digest": {"sha256": imatrix_sha256}})
    return {
        "buildDefinition": {
            "buildType": _BUILD,
            "externalParameters": dict(settings),
            "resolvedDependencies": inputs,
        },
        "runDetails": {"builder": {"id": f"urn:kimi-gguf:{VERSION}", "version": {"kimi-gguf": VERSION}}},
    }


def _model(card: ModelCard) -> dict[str, Any]:
    """What the checkpoint says of itself, for those who publish what was made of it."""
    return {
        "name": card.name,
        "license": card.license,
        "license_name": card.license_name,
        "license_link": card.license_link,
        "languages": list(card.languages),
    }


def _dimensions(config: ModelConfig) -> dict[str, Any]:
    """What the memory of a context follows from."""
    return {
        "context_length": config.context_length,
        "kda_layers": config.layer_kinds.count("kda"),
        "mla_layers": config.layer_kinds.count("mla"),
        "indexer_layers": len(config.dsa.layers) if config.dsa else 0,
        "kda_heads": config.kda.heads,
        "kda_head_dim": config.kda.head_dim,
        "kda_conv_kernel": config.kda.conv_kernel,
        "mla_latent": config.mla.kv_lora + config.mla.rope,
        "indexer_head_dim": config.dsa.head_dim if config.dsa else 0,
    }


def _shard(shard: Shard) -> dict[str, Any]:
    entry = {"name": shard.name, "bytes": shard.nbytes, "header_sha256": shard.header_sha256}
    return entry | {"sha256": shard.sha256} if shard.sha256 else entry


def _tensor(tensor: PlannedTensor, digest: str | None, source: Source) -> dict[str, Any]:
    spec = tensor.spec
    shards = {source.tensors[name].shard for name in source_names(spec, 0, row_count(spec))}
    entry: dict[str, Any] = {
        "name": spec.name,
        "shape": list(spec.shape),
        "type": tensor.qtype.name,
        "bytes": tensor.nbytes,
        "file": tensor.file,
        "sources": list(spec.sources),
        "shards": sorted(shards),
    }
    if digest is not None:
        entry["sha256"] = digest
    if spec.experts:
        entry["experts"] = spec.experts
    if tensor.reason:
        entry |= {"recipe_type": tensor.recipe_type.name, "reason": tensor.reason}
    return entry


def document_bytes(document: Mapping[str, Any]) -> bytes:
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
