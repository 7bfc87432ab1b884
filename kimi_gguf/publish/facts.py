"""What a model card says of one quant, all of it read from the quant's manifest and its eval report."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.manifest import document_bytes
from kimi_gguf.sizes import SizedTensor, SizeReport, size_report
from quant.errors import InputError
from quant.types import parse_type

SCHEME = "hf://"
_REPEATED = frozenset({"--tensor-type", "--override-kv"})


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of a quant: its name, bytes, SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """Memory of a context: bytes that every sequence takes, and bytes for each of its tokens.

    MLA keeps one latent per token and layer, in 16 bits, and the indexer one key; KDA keeps a state in float32 that
    does not grow, and the last inputs of its three convolutions.
    """

    state: int
    per_token: int
    longest: int

    def at(self, tokens: int) -> int:
        return self.state + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """One quant of a repository.

    Attributes:
        document: its manifest.
        files: in order.
        sizes: of its tensors.
        report: its eval report as plain values, if it has one.
    """

    document: Mapping[str, Any]
    files: tuple[PublishedFile, ...]
    sizes: SizeReport
    report: Mapping[str, Any] | None = None

    @property
    def quant(self) -> str:
        return str(self.document["quant"])

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def source(self) -> Mapping[str, Any]:
        found = self.document.get("source")
        return found if isinstance(found, dict) else {}

    @property
    def base_repo(self) -> str | None:
        """The repository that it was converted from, when it came from the Hub."""
        origin = str(self.source.get("origin") or "")
        return origin.removeprefix(SCHEME).partition("@")[0] if origin.startswith(SCHEME) else None

    def expert_types(self) -> str:
        """Types of the routed experts, the largest share first."""
        shares: Counter[str] = Counter()
        for tensor in self.document["tensors"]:
            if tensor.get("experts"):
                shares[tensor["type"]] += tensor["bytes"]
        return ", ".join(name for name, _ in shares.most_common()) or "-"

    def command(self) -> str:
        """The command that makes these very files."""
        settings = self.document.get("settings") or {}
        name = self.source.get("name") or "CHECKPOINT"
        origin = self.source.get("origin")
        words = ["kimi-gguf", "convert", origin.removeprefix(SCHEME) if self.base_repo and origin else name]
        for flag, value in settings.items():
            value = "imatrix.gguf" if flag == "--imatrix" else str(value)
            for one in value.split(", ") if flag in _REPEATED else [value]:
                words += [flag, one]
        return shlex.join(words)

    def memory(self) -> ContextMemory | None:
        """What a context takes; None when the manifest does not say the model's dimensions."""
        d = self.document.get("dimensions")
        if not isinstance(d, dict):
            return None
        heads, width = d["kda_heads"], d["kda_head_dim"]
        state = heads * width * width + 3 * (d["kda_conv_kernel"] - 1) * heads * width
        per_token = d["mla_layers"] * d["mla_latent"] + d["indexer_layers"] * d["indexer_head_dim"]
        return ContextMemory(d["kda_layers"] * state * 4, per_token * 2, d["context_length"])


_PARTS = ("settings", "source", "tool", "model", "dimensions")
DIMENSIONS = (
    "kda_heads", "kda_head_dim", "kda_conv_kernel", "kda_layers", "mla_layers", "mla_latent", "indexer_layers",
    "indexer_head_dim", "context_length",
)  # fmt: skip


def read_manifest(data: bytes, where: str) -> dict[str, Any]:
    """A manifest as plain values.

    Raises:
        InputError: it is none.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not is_manifest(document):
        raise InputError(f"{where} is no manifest of kimi-gguf", "convert writes it beside the model")
    found: dict[str, Any] = document
    return found


def is_manifest(document: object) -> bool:
    return isinstance(document, dict) and {"format", "quant", "files", "tensors"} <= document.keys()


def facts_of(document: Mapping[str, Any], reports: Sequence[Mapping[str, Any]] = ()) -> QuantFacts:
    """The facts of a manifest, with that of ``reports`` which evaluated these files on the longest text.

    Raises:
        InputError: the manifest is incomplete or damaged.
    """
    try:
        files = tuple(PublishedFile(str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in document["files"])
        sizes = size_report(
            SizedTensor(parse_type(t["type"]), math.prod(t["shape"]), t["bytes"], bool(t.get("experts")))
            for t in document["tensors"]
        )
        if not all(isinstance(document.get(part), dict | None) for part in _PARTS):
            raise TypeError
        dimensions = document.get("dimensions") or dict.fromkeys(DIMENSIONS, 0)
        if not all(isinstance(dimensions[name], int) for name in DIMENSIONS):
            raise TypeError
        if not isinstance(document.get("warnings"), list | None):
            raise TypeError
        if not all(isinstance(document.get(name), str | None) for name in ("architecture", "encoder")):
            raise TypeError
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise InputError(f"the manifest of {document.get('quant')} is not whole", "finish the conversion") from None
    fitting = [report for report in reports if evaluated(report, files)]
    best = max(fitting, key=lambda report: report.get("tokens") or 0, default=None)
    return QuantFacts(document, files, sizes, best)


def is_report(document: object) -> bool:
    return isinstance(document, dict) and document.get("kind") == "kimi-gguf eval"


def is_sound(report: Mapping[str, Any]) -> bool:
    """Whether everything that the card and the gate read in an eval report has the form that ``eval`` gives it."""
    hashes, baseline, flags = report.get("model_files"), report.get("baseline"), report.get("flags")
    return (
        (hashes is None or (isinstance(hashes, dict) and all(isinstance(h, str) for h in hashes.values())))
        and isinstance(report.get("tokens"), int)
        and isinstance(report.get("text_name"), str)
        and isinstance(baseline, dict)
        and isinstance(baseline.get("label"), str)
        and all(isinstance(report.get(part), dict | None) for part in ("output", "routing"))
        and isinstance(flags, list | None)
        and isinstance(report.get("below_bar"), list)
        and isinstance(report.get("bars"), dict | None)
    )


def evaluated(report: Mapping[str, Any], files: Sequence[PublishedFile]) -> bool:
    """Whether ``report`` is about exactly these files."""
    hashes = report.get("model_files")
    return isinstance(hashes, dict) and bool(hashes) and set(hashes.values()) == {file.sha256 for file in files}


def without_paths(document: Mapping[str, Any]) -> bytes:
    """A manifest as it is published: a checkpoint that was a folder is named, its path is not."""
    source = document.get("source")
    if isinstance(source, dict) and not str(source.get("origin") or "").startswith(SCHEME):
        document = {**document, "source": {**source, "origin": None}}
    return document_bytes(document)
