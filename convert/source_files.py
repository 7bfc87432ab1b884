"""Which files of a folder are the checkpoint: side files, shard names, index, label, revision. Nothing is written."""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from convert.bounded_json import AGAIN, Cursor, decode_text, load_object
from convert.domain import SourceTensor
from quant.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The release's index, the largest side file, has 60 MB.
MAX_SIDE_FILE_BYTES = 512_000_000
MAX_SHARDS = 100_000
_SET_MEMBER = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Listing:
    """Shard names in walking order, warnings, and the index's text when there is one."""

    names: tuple[str, ...]
    warnings: tuple[str, ...]
    index: str | None


def read_side_file(directory: Path, name: str) -> bytes | None:
    """Content of a small file, None when there is none.

    Raises:
        InputError: a broken link, not a regular file, unreadable, or larger than 512 MB.
    """
    path = directory / name
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"{name}: not a regular file", AGAIN)
        if info.st_size > MAX_SIDE_FILE_BYTES:
            raise InputError(f"{name}: {info.st_size} bytes, at most {MAX_SIDE_FILE_BYTES} are read", AGAIN)
        return path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise InputError(f"{name}: a link to a missing file", "download the checkpoint again") from None
        return None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}", "check its permissions and the disk") from None


def label_and_revision(directory: Path) -> tuple[str, str | None]:
    """The model's name and, for a snapshot in a Hub cache, its commit.

    The name comes from ``models--org--name``, else from the folder, else from config.json; a commit is never a name.
    """
    directory = directory.resolve()
    revision = directory.name if _COMMIT.fullmatch(directory.name) else None
    repo = directory.parent.parent.name if directory.parent.name == "snapshots" else directory.name
    if repo.startswith("models--"):
        return repo.split("--", 2)[-1] or "model", revision
    if directory.name and revision is None:
        return directory.name, None
    data = read_side_file(directory, "config.json")
    named = load_object(data, "config.json").get("_name_or_path") if data else None
    name = PurePosixPath(named).name if isinstance(named, str) and named.isprintable() else ""
    return name or "model", None


def list_shards(directory: Path) -> Listing:
    """The shards of the checkpoint in a folder; as ``choose_shards``."""
    found = [p.name for p in directory.iterdir()]
    data = read_side_file(directory, INDEX)
    return choose_shards(str(directory.name or directory), found, data, lambda name: _is_file(directory / name))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A name longer than any file's, or below a folder that may not be read.
        return False


def choose_shards(label: str, files: Iterable[str], index: bytes | None, is_there: Callable[[str], bool]) -> Listing:
    """A checkpoint's shards: those that the index names and their siblings, or all of one set, or a single file.

    Args:
        label: of the checkpoint, for messages.
        files: names at its top level.
        index: content of its index file.
        is_there: whether a file that the index names, perhaps below the top level, is there.

    Raises:
        InputError: no safetensors, a shard that is named but missing, a name that leaves the folder, two layouts.
    """
    found = sorted(name for name in files if name.endswith(".safetensors"))
    if index is None:
        return Listing(_without_index(label, found), (), None)
    text = decode_text(index, INDEX)
    named = _indexed_names(text, is_there)
    sets = {_set_of(name) for name in named} - {None}
    siblings = [name for name in found if name not in named and _set_of(name) in sets]
    strangers = [name for name in found if name not in named and name not in siblings]
    warnings = []
    if siblings:
        warnings.append(f"{INDEX} does not name {len(siblings)} shards, read anyway: {first_of(siblings)}")
    if strangers:
        warnings.append(f"{len(strangers)} safetensors files are not part of the checkpoint: {first_of(strangers)}")
    return Listing(tuple(sorted([*named, *siblings])), tuple(warnings), text)


def index_warnings(text: str, tensors: Mapping[str, SourceTensor], names: Sequence[str]) -> list[str]:
    """What the index says otherwise than the shard headers, which are the truth.

    Raises:
        InputError: the index lists tensors that no shard holds.
    """
    absent: list[str] = []
    moved: list[str] = []
    listed = 0
    for name, file in walk_index(text):
        tensor = tensors.get(name)
        if tensor is None:
            absent.append(name)
            continue
        listed += 1
        if names[tensor.shard] != file:
            moved.append(name)
    if absent:
        raise InputError(
            f"{INDEX} lists {len(absent)} tensors that no shard holds: {first_of(absent)}",
            "download the checkpoint again, or remove the index if the shards are complete",
        )
    warnings = []
    if moved:
        warnings.append(f"{INDEX} places {len(moved)} tensors in other shards than hold them: {first_of(moved)}")
    if listed != len(tensors):
        known = {name for name, _ in walk_index(text)}
        omitted = [name for name in tensors if name not in known]
        warnings.append(f"{INDEX} omits {len(omitted)} tensors that the shards hold: {first_of(omitted)}")
    return warnings


def walk_index(text: str) -> Iterator[tuple[str, str]]:
    """(tensor, shard name) pairs of the index, one at a time.

    Raises:
        InputError: not the JSON of an index.
    """
    cursor = Cursor(text, INDEX)
    found = False
    for member in cursor.members():
        if member == "weight_map":
            found = True
            for tensor in cursor.members():
                yield tensor, cursor.string()
        else:
            cursor.skip_value()
    cursor.finish()
    if not found:
        raise InputError(f"{INDEX}: no weight_map", "remove the index if the shards are complete")


def first_of(names: Sequence[str], count: int = 3) -> str:
    """The first few ``names``, safe to print."""
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:count])
    return shown + (f" and {len(names) - count} more" if len(names) > count else "")


def _set_of(name: str) -> tuple[str, int] | None:
    match = _SET_MEMBER.fullmatch(name)
    return (match[1], int(match[3])) if match else None


def _indexed_names(text: str, is_there: Callable[[str], bool]) -> list[str]:
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for tensor, file in walk_index(text):
        counts[file] += 1
        first.setdefault(file, tensor)
        if len(counts) > MAX_SHARDS:
            raise InputError(f"{INDEX} names more than {MAX_SHARDS} shards", AGAIN)
    if not counts:
        raise InputError(f"{INDEX}: the weight_map is empty", "remove the index if the shards are complete")
    for name in counts:
        _check_inside(name)
    missing = sorted(name for name in counts if not is_there(name))
    if missing:
        held = sum(counts[name] for name in missing)
        raise InputError(
            f"{INDEX} names {len(missing)} shards that are not there: {first_of(missing)}; "
            f"they hold {held} tensors, first {first_of([first[name] for name in missing])}",
            "finish the download of the checkpoint",
        )
    return sorted(counts)


def _check_inside(name: str) -> None:
    parts = PurePosixPath(name).parts
    if not name.isprintable() or "\\" in name or ".." in parts or not parts or name.startswith("/"):
        raise InputError(f"{INDEX} names the shard {name!a:.200}, which is not a plain name inside the folder", AGAIN)


def _without_index(label: str, found: Sequence[str]) -> tuple[str, ...]:
    sets = {_set_of(name) for name in found} - {None}
    numbered = [name for name in found if name.startswith("model-")]
    if SINGLE in found and not numbered:
        return (SINGLE,)
    if not numbered:
        raise InputError(
            f"{label}: no checkpoint: neither {SINGLE} nor model-*.safetensors"
            + (f", only {first_of(found)}" if found else ""),
            "name the folder that holds config.json and the shards",
        )
    if SINGLE in found or len({s for s in sets if s and s[0].startswith("model")}) > 1:
        raise InputError(
            f"{label}: shards of several checkpoints and no {INDEX}: {first_of(found)}",
            "move the files of the other checkpoint away",
        )
    _check_complete(numbered)
    return tuple(numbered)


def _check_complete(names: Sequence[str]) -> None:
    matches = [m for m in map(_SET_MEMBER.fullmatch, names) if m]
    if not matches:
        return
    total = int(matches[0][3])
    have = {int(m[2]) for m in matches}
    lacking = [str(n) for n in range(1, total + 1) if n not in have]
    if lacking:
        raise InputError(
            f"{len(lacking)} of {total} shards are not there: numbers {first_of(lacking, 8)}",
            "finish the download of the checkpoint",
        )
