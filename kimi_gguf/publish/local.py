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
from kimi_gguf.publish.facts import QuantFacts, facts_of, is_manifest, is_report, is_sound, without_paths
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

    def files(self) -> list[Upload]:
        """The model's files, where they go."""
        return [
            Upload(f"{self.facts.quant}/{path.name}", path, file.nbytes, file.sha256)
            for path, file in zip(self.paths, self.facts.files, strict=True)
        ]

    def uploads(self) -> list[Upload]:
        """The model's files and its manifest, where they go."""
        manifest = manifest_path(self.facts.quant, self.stem)
        return [*self.files(), small(manifest, without_paths(self.facts.document))]


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


def gather(paths: Sequence[str | os.PathLike[str]], *, as_you_go: bool = False) -> Bundle:
    """Look at files and folders.

    Args:
        as_you_go: files that a manifest names may be missing: an earlier run has published and removed them. A model
            without a manifest is refused, as nothing would tell what it lacks once a file of it is gone.

    Raises:
        UsageError: there is no such file, nothing to publish, or a quant twice.
        InputError: a file that cannot be published.
        OutputError: a conversion that is not finished.
    """
    named = [Path(path) for path in paths]
    missing = [path for path in named if not (path.exists() or (as_you_go and _manifest_beside(path).is_file()))]
    if missing:
        raise UsageError(f"there is no file or folder {missing[0]}", "name the folder that convert wrote to")
    found = sorted({file for path in named for file in _files(path)})
    unfinished = [path for path in found if path.name.endswith((JOURNAL, PARTIAL))]
    if unfinished:
        raise OutputError(
            f"{unfinished[0]} belongs to a conversion that is not finished", "finish it by its own command first"
        )
    manifests, reports, imatrices, ignored = {}, [], [], []
    ggufs: dict[Path, None] = {}
    for path in found:
        if path.suffix == ".gguf":
            if parse_gguf(path).get_str("general.type") == "imatrix":
                imatrices.append(path)
            else:
                ggufs[path] = None
        elif path.suffix == ".json" and (document := _json(path)) is not None:
            if is_manifest(document):
                _check_manifest(path, document)
                manifests[path] = document
            elif is_report(document):
                if not is_sound(document):
                    raise InputError(f"{path} is damaged: no whole eval report", "evaluate again, or move it elsewhere")
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
    if as_you_go:
        models = [model for path, document in manifests.items() if (model := _partly_gone(path, document))]
        for path in (path for model in models for path in model.paths):
            ggufs.pop(path, None)
    while ggufs:
        files = read_gguf_set(next(iter(ggufs)))
        for path in files.paths:
            ggufs.pop(path, None)
        model, more = _model(files, list(manifests.values()), as_you_go)
        models.append(model)
        warnings += more
    if not (models or reports or imatrices):
        hint = "the files of the manifest are gone; if an earlier run published them, give --as-you-go again"
        raise UsageError(
            f"there is nothing to publish in {', '.join(map(str, named))}",
            hint if manifests else "name a folder with GGUF files",
        )
    _check_distinct(models)
    return Bundle(tuple(models), tuple(reports), imatrices[0] if imatrices else None, tuple(ignored), tuple(warnings))


def _files(path: Path) -> Iterator[Path]:
    """A file with the manifest beside it, or all visible files of a folder."""
    if not path.is_dir():
        if path.exists():
            yield path
        manifest = _manifest_beside(path)
        if path.suffix == ".gguf" and manifest.is_file():
            yield manifest
        return
    for found in path.rglob("*"):
        if found.is_file() and not any(part.startswith(".") for part in found.relative_to(path).parts):
            yield found


def _manifest_beside(path: Path) -> Path:
    split = parse_split_name(path.name)
    return path.with_name((f"{split[0]}.gguf" if split else path.name) + MANIFEST)


def _json(path: Path) -> Any:
    if path.stat().st_size > _LARGEST_JSON:
        return None
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def _check_manifest(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a manifest that is not whole, or names anything but GGUF files beside it."""
    try:
        names = [file.name for file in facts_of(document).files]
    except InputError:
        names = []
    if not names or not all(name.endswith(".gguf") and Path(name).name == name for name in names):
        raise InputError(f"{path} is damaged or not whole", "convert the model again, or move it elsewhere")


def _partly_gone(manifest: Path, document: Mapping[str, Any]) -> LocalModel | None:
    """The model of a manifest, when not all of its files are beside it; None when they are."""
    facts = facts_of(document)
    paths = tuple(manifest.with_name(file.name) for file in facts.files)
    if all(path.is_file() for path in paths):
        return None
    sizes = [parse_gguf(path).file_size if path.is_file() else None for path in paths]
    return LocalModel(paths, facts, _checked_stem(paths, facts, sizes))


def _model(files: GgufSet, manifests: Sequence[Mapping[str, Any]], as_you_go: bool) -> tuple[LocalModel, list[str]]:
    names = [path.name for path in files.paths]
    warnings = []
    for path, header in zip(files.paths, files.headers, strict=True):
        if header.file_size > LARGEST_FILE:
            raise InputError(f"{path} has {header.file_size:,} bytes; the Hub takes files up to 500 GB", _CONVERT_AGAIN)
        if header.file_size > ADVISED_FILE:
            warnings.append(f"{path.name} has {human_bytes(header.file_size)}; the Hub advises at most 200 GB a file")
    document = next((m for m in manifests if [f.get("name") for f in m["files"]] == names), None)
    if document is None:
        if as_you_go:
            raise UsageError(
                f"{names[0]}: no manifest beside it, so nothing would tell which files are gone",
                "publish it without --as-you-go",
            )
        warnings.append(f"{names[0]}: no manifest, so nothing shows what it was made from; its hashes are taken now")
        document = _described(files)
    facts = facts_of(document)
    stem = _checked_stem(files.paths, facts, [header.file_size for header in files.headers])
    return LocalModel(files.paths, facts, stem), warnings


def _checked_stem(paths: Sequence[Path], facts: QuantFacts, sizes: Iterable[int | None]) -> str:
    """Name of a set whose files fit its manifest, None being the size of one that is not here."""
    for path, size, file in zip(paths, sizes, facts.files, strict=True):
        if size not in (None, file.nbytes):
            raise InputError(f"{path} has {size:,} bytes, its manifest says {file.nbytes:,}", "convert it again")
    name = paths[0].name
    split = parse_split_name(name)
    stem = split[0] if split and len(paths) > 1 else name.removesuffix(".gguf")
    if not stem.upper().endswith(f"-{facts.quant}"):
        raise InputError(
            f"{name}: its name does not end in -{facts.quant}, so llama.cpp's -hf REPO:{facts.quant} would miss it",
            "rename it, or convert with --outdir, which names files by convention",
        )
    return stem


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
