"""What a command line gives to publish: models with their manifests, eval reports, importance matrices."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.output import JOURNAL, MANIFEST, PARTIAL
from kimi_gguf.publish.facts import QuantFacts, facts_of, is_manifest, is_report, without_paths
from kimi_gguf.publish.target import ADVISED_FILE, LARGEST_FILE, Upload, small
from kimi_gguf.sizes import human_bytes
from quant.errors import InputError, OutputError, UsageError
from quant.gguf_parser import parse_gguf
from quant.gguf_split import GgufSet, parse_split_name, read_gguf_set
from quant.recipes import RECIPES

_LARGEST_JSON = 1 << 28
IMATRIX = "imatrix.gguf"
EVAL = ".eval.json"
_CONVERT_AGAIN = "convert it again with --split-max-size 48G"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One quant on disk.

    Attributes:
        paths: its files, in order.
        facts: from its manifest, or from its header when it has none.
        stem: name of the set, ``Kimi-K3.1-Pro-Q4_K_M``.
    """

    paths: tuple[Path, ...]
    facts: QuantFacts
    stem: str

    def uploads(self) -> list[Upload]:
        """The model's files and its manifest, where they go."""
        folder = self.facts.quant
        files = [
            Upload(f"{folder}/{path.name}", path, file.nbytes, file.sha256)
            for path, file in zip(self.paths, self.facts.files, strict=True)
        ]
        return [*files, small(manifest_path(folder, self.stem), without_paths(self.facts.document))]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Everything that was found.

    Attributes:
        models: by folder and name.
        reports: eval reports by path.
        imatrix: at most one.
        ignored: files of a folder that are nothing to publish.
        warnings: sentences.
    """

    models: tuple[LocalModel, ...]
    reports: tuple[tuple[Path, Mapping[str, Any]], ...]
    imatrix: Path | None
    ignored: tuple[Path, ...]
    warnings: tuple[str, ...]


def manifest_path(folder: str, stem: str) -> str:
    return f"{folder}/{stem}.gguf{MANIFEST}"


def gather(paths: Sequence[str | os.PathLike[str]]) -> Bundle:
    """Look at files and folders.

    Raises:
        UsageError: there is no such file, nothing to publish, or a quant twice.
        InputError: a file that cannot be published.
        OutputError: a conversion that is not finished.
    """
    named = [Path(path) for path in paths]
    missing = [path for path in named if not path.exists()]
    if missing:
        raise UsageError(f"there is no file or folder {missing[0]}", "name the folder that convert wrote to")
    found = sorted({file for path in named for file in _files(path)})
    unfinished = [path for path in found if path.name.endswith((JOURNAL, PARTIAL))]
    if unfinished:
        raise OutputError(
            f"{unfinished[0]} belongs to a conversion that is not finished", "finish it by its own command first"
        )
    manifests, reports, imatrices, ignored = [], [], [], []
    ggufs: dict[Path, None] = {}
    for path in found:
        if path.suffix == ".gguf":
            if parse_gguf(path).get_str("general.type") == "imatrix":
                imatrices.append(path)
            else:
                ggufs[path] = None
        elif path.suffix == ".json" and (document := _json(path)) is not None:
            if is_manifest(document):
                manifests.append(document)
            elif is_report(document):
                reports.append((path, document))
            else:
                ignored.append(path)
        else:
            ignored.append(path)
    wrong = [path for path in ignored if path in named]
    if wrong:
        raise UsageError(
            f"{wrong[0]} is neither a GGUF, a manifest, nor an eval report", "publish other files with `hf upload`"
        )
    if len(imatrices) > 1:
        raise UsageError(f"{len(imatrices)} importance matrices: {', '.join(map(str, imatrices))}", "publish one")
    models, warnings = [], []
    while ggufs:
        files = read_gguf_set(next(iter(ggufs)))
        for path in files.paths:
            ggufs.pop(path, None)
        model, more = _model(files, manifests)
        models.append(model)
        warnings += more
    if not (models or reports or imatrices):
        raise UsageError(
            f"there is nothing to publish in {', '.join(map(str, named))}", "name a folder with GGUF files"
        )
    _check_distinct(models)
    return Bundle(tuple(models), tuple(reports), imatrices[0] if imatrices else None, tuple(ignored), tuple(warnings))


def _files(path: Path) -> Iterator[Path]:
    """A file with the manifest beside it, or all visible files of a folder."""
    if not path.is_dir():
        yield path
        split = parse_split_name(path.name)
        manifest = path.with_name((f"{split[0]}.gguf" if split else path.name) + MANIFEST)
        if path.suffix == ".gguf" and manifest.is_file():
            yield manifest
        return
    for found in path.rglob("*"):
        if found.is_file() and not any(part.startswith(".") for part in found.relative_to(path).parts):
            yield found


def _json(path: Path) -> Any:
    if path.stat().st_size > _LARGEST_JSON:
        return None
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def _model(files: GgufSet, manifests: Iterable[Mapping[str, Any]]) -> tuple[LocalModel, list[str]]:
    names = [path.name for path in files.paths]
    warnings = []
    for path, header in zip(files.paths, files.headers, strict=True):
        if header.file_size > LARGEST_FILE:
            raise InputError(f"{path} has {header.file_size:,} bytes; the Hub takes files up to 500 GB", _CONVERT_AGAIN)
        if header.file_size > ADVISED_FILE:
            warnings.append(f"{path.name} has {human_bytes(header.file_size)}; the Hub advises at most 200 GB a file")
    document = next((m for m in manifests if [f.get("name") for f in m["files"]] == names), None)
    if document is None:
        warnings.append(f"{names[0]}: no manifest, so nothing shows what it was made from; its hashes are taken now")
        document = _described(files)
    facts = facts_of(document)
    for path, header, file in zip(files.paths, files.headers, facts.files, strict=True):
        if header.file_size != file.nbytes:
            raise InputError(
                f"{path} has {header.file_size:,} bytes, its manifest says {file.nbytes:,}", "convert it again"
            )
    split = parse_split_name(names[0])
    stem = split[0] if split and len(names) > 1 else names[0].removesuffix(".gguf")
    if not stem.upper().endswith(f"-{facts.quant}"):
        raise InputError(
            f"{names[0]}: its name does not end in -{facts.quant}, so llama.cpp's -hf REPO:{facts.quant} would miss it",
            "rename it, or convert with --outdir, which names files by convention",
        )
    return LocalModel(files.paths, facts, stem), warnings


def _described(files: GgufSet) -> dict[str, Any]:
    """What can be said of a model without a manifest, in the manifest's form."""
    file_type = files.metadata.get("general.file_type")
    quant = next((name for name, info in RECIPES.items() if file_type and info.file_type == file_type.value), None)
    if quant is None:
        raise InputError(
            f"{files.paths[0]}: general.file_type names no recipe that is known, and there is no manifest",
            "put the manifest that convert wrote beside it",
        )
    tensors = [
        {
            "name": t.name,
            "shape": list(t.shape),
            "type": t.qtype.name,
            "bytes": t.nbytes,
            "file": number,
            **({"experts": t.shape[0]} if "_exps." in t.name else {}),
        }
        for number, header in enumerate(files.headers)
        for t in header.tensors
    ]
    hashed = [
        {"name": path.name, "bytes": header.file_size, "sha256": _sha256(path)}
        for path, header in zip(files.paths, files.headers, strict=True)
    ]
    architecture = files.headers[0].get_str("general.architecture")
    subject = [{"name": f["name"], "digest": {"sha256": f["sha256"]}} for f in hashed]
    return {
        "subject": subject,
        "format": 1,
        "complete": True,
        "architecture": architecture,
        "quant": quant,
        "files": hashed,
        "tensors": tensors,
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_distinct(models: Sequence[LocalModel]) -> None:
    seen: dict[str, LocalModel] = {}
    for model in models:
        other = seen.setdefault(model.facts.quant, model)
        if other is not model:
            raise UsageError(
                f"{model.paths[0].name} and {other.paths[0].name} are both {model.facts.quant}",
                "publish one of them; a repository has one of each",
            )
