"""What MODEL and BASE of a command line mean: a GGUF or a checkpoint folder, opened for the stream engine."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from convert.config import ModelConfig
from convert.domain import Source
from convert.source import open_source
from kimi_gguf.reference.checkpoint_store import CheckpointStore
from kimi_gguf.reference.gguf_store import GgufStore
from kimi_gguf.reference.weights import WeightStore
from kimi_gguf.verify.observations import ModelIdentity
from kimi_gguf.verify.text import Vocabulary, checkpoint_vocabulary, gguf_vocabulary
from quant.errors import UsageError
from quant.gguf_split import GgufSet, read_gguf_set
from quant.recipes import RECIPES


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose weights can be read, its identity and its vocabulary.

    ``stamp`` differs once the files may have changed, even where the identity, made from headers, does not.
    """

    path: Path
    store: WeightStore
    identity: ModelIdentity
    vocabulary: Vocabulary
    stamp: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()


def open_model(path: Path) -> OpenModel:
    """Open a GGUF (any file of a split set) or a checkpoint folder.

    Raises:
        UsageError: there is nothing of that name.
        InputError: it is neither, or damaged.
    """
    if path.is_dir():
        source = open_source(path)
        store = CheckpointStore(source)
        identity = _identity(source.label, store.config, _checkpoint_digest(source), None)
        stamp = " ".join(source.stamp(shard) for shard in range(len(source.shards)))
        return OpenModel(path, store, identity, checkpoint_vocabulary(source), stamp)
    if not path.is_file():
        raise _missing(path)
    files = read_gguf_set(path)
    gguf = GgufStore(path)
    file_type = files.metadata.get("general.file_type")
    recipe = None if file_type is None else _recipe_of(file_type.value)
    identity = _identity(path.name, gguf.config, _gguf_digest(files), recipe)
    stamp = " ".join(str(file.stat().st_mtime_ns) for file in files.paths)
    return OpenModel(path, gguf, identity, gguf_vocabulary(path), stamp)


def _missing(path: Path) -> UsageError:
    """What to say of a name that nothing has; of a repository every layer is read, so it must be here first."""
    # A path has lost one of the slashes of hf:// and https://.
    text = re.sub(r"^(hf|https):/", r"\1://", str(path))
    message = f"there is no file or folder {text}"
    name = re.sub(r"^(hf://|https://(huggingface\.co|hf\.co)/)", "", text)
    if name == text and not re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", name):
        return UsageError(message, "name a GGUF, or the folder of a checkpoint")
    owner, _, rest = name.partition("/")
    repo, _, inside = rest.partition("/")
    only = f" --include '{inside}*'" if inside else ""
    return UsageError(
        f"{message}; this verb reads local files only, not the Hub",
        "name a GGUF or the folder of a checkpoint; a repository is fetched first: "
        f"hf download {owner}/{repo.partition('@')[0]}{only} --local-dir FOLDER",
    )


def file_hashes(path: Path) -> dict[str, str]:
    """SHA-256 of every file of a GGUF by name; empty for a folder of a checkpoint."""
    if path.is_dir():
        return {}
    hashes = {}
    for part in read_gguf_set(path).paths:
        with part.open("rb") as file:
            hashes[part.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _identity(label: str, config: ModelConfig, digest: str, recipe: str | None) -> ModelIdentity:
    return ModelIdentity(
        label=label,
        arch=config.arch,
        digest=digest,
        layers=config.n_layers,
        experts=config.moe.experts,
        used=config.moe.used,
        moe_layers=tuple(range(config.dense_layers, config.n_layers)),
        layer_kinds=tuple(config.layer_kinds),
        indexer_top_k=None if config.dsa is None else config.dsa.top_k,
        recipe=recipe,
    )


def _recipe_of(file_type: object) -> str | None:
    """The recipe of a file type; several names where recipes share one."""
    return " or ".join(name for name, info in RECIPES.items() if info.file_type == file_type) or None


def _checkpoint_digest(source: Source) -> str:
    digest = hashlib.sha256(source.read_file("config.json") or b"")
    for shard in source.shards:
        digest.update(f"{shard.name} {shard.nbytes} {shard.header_sha256}\n".encode())
    return digest.hexdigest()


def _gguf_digest(files: GgufSet) -> str:
    digest = hashlib.sha256()
    for path, header in zip(files.paths, files.headers, strict=True):
        digest.update(f"{header.file_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.sha256(file.read(header.data_offset)).digest())
    return digest.hexdigest()
