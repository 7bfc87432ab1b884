"""One file of a model that goes to the Hub by a commit of its own, and is removed here once the Hub lists its hash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from convert.disk import disk_faults
from kimi_gguf.hub.repository import Repository
from kimi_gguf.publish.target import Operation, Target, Upload
from quant.errors import InputError

_KEPT = "the same command continues; the local file is kept"


def send_away(
    target: Target, upload: Upload, message: str, beside: Callable[[Repository], Iterable[Operation]] = lambda now: ()
) -> None:
    """Upload a file, commit it, and remove it here.

    Its bytes are hashed here in any case, also when the Hub holds the file already.

    Args:
        upload: of a file on disk.
        message: title of the commit.
        beside: what goes into the same commit.

    Raises:
        InputError: the Hub refuses, fails too often, or holds other bytes; the file has changed meanwhile. It is kept
            then.
    """
    path = Path(str(upload.content))
    before = _stamp(path)
    add = target.upload(upload)
    state = target.commit(lambda now: [add, *beside(now)], message)
    listed, sent = state.files[upload.path].sha256, add.upload_info.sha256.hex()
    if listed != sent:
        raise InputError(f"{target.repo}/{upload.path}: the Hub lists {listed or 'no SHA-256'}, here is {sent}", _KEPT)
    if _stamp(path) != before:
        raise InputError(f"{path} has changed while it was uploaded", _KEPT)
    with disk_faults(path):
        os.unlink(path)  # noqa: PTH108
    target.note(f"published and removed: {path.name}")


def send_all_away(target: Target, uploads: Sequence[Upload], message: str) -> None:
    """Send the files of models away, one by one; those that are gone already must be on the Hub, by hash.

    Raises:
        InputError: as ``send_away``; a file that is neither here nor there.
    """
    held = target.look().files
    here = [upload for upload in uploads if Path(str(upload.content)).exists()]
    for upload in uploads:
        if upload not in here:
            check_held(target.repo, upload, held[upload.path].sha256 if upload.path in held else None)
    for upload in here:
        send_away(target, upload, message)


def check_held(repo: str, upload: Upload, listed: str | None) -> None:
    """Refuse a file that is not here, and of which the Hub lists another hash, or none.

    Raises:
        InputError: says both.
    """
    if listed is None or listed != upload.sha256:
        raise InputError(
            f"{Path(str(upload.content))} is missing, and {repo}/{upload.path} on the Hub "
            + (f"has SHA-256 {listed}; its manifest says {upload.sha256}" if listed else "too"),
            "convert the model again, or name what is to be published file by file",
        )


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
