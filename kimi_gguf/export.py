"""The functions behind the verbs ``export ollama`` and ``export lmstudio``; their parameters are named as the flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.metadata import file_stem
from convert.output import write_atomically
from kimi_gguf.cache import in_home
from kimi_gguf.export_merge import CopyProgress, Merge, Quiet, check_room, plan_merge, run_merge
from kimi_gguf.export_modelfile import modelfile
from quant.errors import InputError, OutputError
from quant.gguf_split import GgufSet, parse_split_name, read_gguf_set

PathLike = str | os.PathLike[str]
ARCHITECTURES = ("kimi-k3", "kimi-k31")
_PUBLISHER = "local"
_FORBIDDEN = frozenset('"\n\r')


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export made.

    Attributes:
        directory: the folder to use.
        files: its files, or the model's where they stay where they are.
        way: how the model got there: ``in place``, ``merged``, ``hard link``, ``symbolic link``.
        added_bytes: disk that this took.
    """

    directory: Path
    files: tuple[Path, ...]
    way: str
    added_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "files": [str(file) for file in self.files],
            "way": self.way,
            "added_bytes": self.added_bytes,
        }


def export_ollama(
    model: PathLike,
    *,
    out: PathLike | None = None,
    note: Callable[[str], None] = lambda text: None,
    progress: CopyProgress | None = None,
) -> Exported:
    """Write a Modelfile; a split set is merged into one file first, since Ollama reads no sets.

    Args:
        model: a GGUF, or any file of a set.
        out: folder; ``NAME-ollama`` beside the model by default.
        note: told what the merge will cost before it begins.
        progress: told of the bytes copied.

    Raises:
        InputError: no such model, or another architecture.
        OutputError: no room, or something else is there, a Modelfile that was edited among it.
    """
    files = _read(model)
    stem = _stem(files)
    directory = _folder(Path(out) if out is not None else files.paths[0].absolute().with_name(f"{stem}-ollama"))
    merge = plan_merge(files, directory / f"{stem}.gguf") if len(files.paths) > 1 else None
    source, way = (merge.target.absolute(), "merged") if merge else (files.paths[0].absolute(), "in place")
    if _FORBIDDEN & set(str(source)):
        raise InputError(f"{source} has a quote or a line end in its path", "rename it: a Modelfile cannot name it")
    target, text = directory / "Modelfile", modelfile(source.name if merge else str(source))
    data = text.encode(errors="surrogateescape")
    if target.exists() and not (target.is_file() and target.read_bytes() == data):
        raise OutputError(f"{target} is there and says something else", "rename or remove it, or give another --out")
    added = _merge(merge, note, progress or Quiet()) if merge else 0
    write_atomically(target, data)
    return Exported(directory, (target, source), way, added)


def export_lmstudio(model: PathLike, *, out: PathLike | None = None) -> Exported:
    """Lay a model out as LM Studio looks for it: ``publisher/model/file.gguf``, by links instead of copies.

    Args:
        model: a GGUF, or any file of a set.
        out: LM Studio's folder of models; ``~/.lmstudio/models`` by default.

    Raises:
        InputError: no such model, or another architecture.
        OutputError: the folder cannot be written, or holds another file of this name.
    """
    files = _read(model)
    header = files.headers[0]
    publisher = file_stem(header.get_str("general.organization") or _PUBLISHER)
    name = file_stem(header.get_str("general.basename") or _stem(files))
    models = Path(out) if out is not None else in_home("~/.lmstudio/models")
    directory = _folder(models / publisher / f"{name}-GGUF")
    ways = {_link(path.absolute(), directory / path.name) for path in files.paths}
    way = "symbolic link" if "symbolic link" in ways else "hard link"
    return Exported(directory, tuple(directory / path.name for path in files.paths), way, 0)


def _merge(merge: Merge, note: Callable[[str], None], progress: CopyProgress) -> int:
    if merge.is_done:
        note(f"{merge.target} is there already")
        return 0
    check_room(merge)
    note(
        f"Ollama reads no split sets: merging {len(merge.files.paths)} files into {merge.target} "
        f"takes {merge.nbytes:,} bytes of disk, and `ollama create` copies them once more into its own store"
    )
    run_merge(merge, progress)
    return merge.nbytes


def _read(model: PathLike) -> GgufSet:
    files = read_gguf_set(Path(model))
    arch = files.headers[0].get_str("general.architecture")
    if arch not in ARCHITECTURES:
        raise InputError(f"{model} is a {arch!r:.40}", f"exported are {' and '.join(ARCHITECTURES)}")
    return files


def _stem(files: GgufSet) -> str:
    name = files.paths[0].name
    split = parse_split_name(name)
    return split[0] if split else name.removesuffix(".gguf")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder {path}: {error.strerror}", "choose another folder with --out"
        ) from None
    return path


def _link(source: Path, target: Path) -> str:
    """A hard link where one filesystem holds both, else a symbolic one; one that is there already is kept."""
    if target.exists() or target.is_symlink():
        if target.exists() and target.samefile(source):
            return "symbolic link" if target.is_symlink() else "hard link"
        raise OutputError(f"{target} is there already and is another file", "remove it, or choose another --out")
    try:
        target.hardlink_to(source)
        return "hard link"
    except OSError:
        try:
            target.symlink_to(source)
        except OSError as error:
            raise OutputError(
                f"cannot link {target} to {source}: {error.strerror}", "choose another folder with --out"
            ) from None
        return "symbolic link"
