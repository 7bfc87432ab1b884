"""Which checkpoint a command means: a folder, or a repository on the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from convert.domain import Source
from convert.source import open_source
from quant.errors import InputError, UsageError

if TYPE_CHECKING:
    from kimi_gguf.hub.retry import Note
    from kimi_gguf.hub.shard_store import Advance

DEFAULT_REPO = "moonshotai/Kimi-K3.1-Pro"
HOW_TO_NAME = (
    "name the folder that holds config.json and the safetensors shards, a download or a snapshot of the Hub's cache: "
    "kimi-gguf convert FOLDER --quant MXFP4; or a repository on the Hub: kimi-gguf convert owner/name --quant MXFP4"
)


def holds_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is meant when no checkpoint is named."""
    return (folder / "config.json").is_file()


def resolve_source(
    src: str | os.PathLike[str] | Source | None,
    *,
    download_dir: Path | None = None,
    beside: Path = Path(),
    max_disk: str | int | None = None,
    keep_shards: bool = False,
    note: Note = lambda text: None,
    fetched: Advance = lambda nbytes: None,
) -> Source:
    """Open the checkpoint that ``src`` names; None is the current folder when it holds one.

    A path that exists wins over anything else; then come ``hf://owner/name@revision`` and ``owner/name@revision``.
    In offline mode (HF_HUB_OFFLINE) a repository is looked for in the library's cache alone.

    Args:
        beside: where the folder of shards is made when no ``download_dir`` is given.
        download_dir, max_disk, keep_shards, note, fetched: for a repository, as ``open_hub_source``.

    Raises:
        UsageError: nothing is named and the current folder holds no checkpoint, or there is no such folder.
        InputError: the folder or repository holds no sound checkpoint, or the Hub cannot be reached.
    """
    if src is None:
        if not holds_checkpoint(Path.cwd()):
            raise UsageError("no checkpoint is named, and the current folder holds none", HOW_TO_NAME)
        return open_source(Path.cwd())
    if not isinstance(src, str | os.PathLike):
        return src
    if Path(src).exists():
        return open_source(Path(src))
    # The Hub's client takes a while to load, and most commands do without it.
    from huggingface_hub.constants import is_offline_mode

    from kimi_gguf.hub.address import is_address, parse_address
    from kimi_gguf.hub.cache import open_cached_source
    from kimi_gguf.hub.faults import NoRepository, Unreachable
    from kimi_gguf.hub.source import open_hub_source

    address = parse_address(os.fspath(src))
    if address is None:
        raise UsageError(f"there is no folder {os.fspath(src)}", HOW_TO_NAME)
    if address.path:
        raise UsageError(f"{address} names a file or folder in a repository, not a checkpoint", HOW_TO_NAME)
    if is_offline_mode():
        try:
            return open_cached_source(address)
        except InputError as fault:
            raise type(fault)(f"there is no local folder {os.fspath(src)}; {fault.message}", fault.hint) from None
    try:
        return open_hub_source(
            address,
            download_dir=download_dir or beside / f"{address.repo.rpartition('/')[2]}.shards",
            max_disk=max_disk,
            keep_shards=keep_shards,
            note=note,
            fetched=fetched,
        )
    except (NoRepository, Unreachable) as fault:
        text = os.fspath(src)
        if is_address(text):
            raise
        if isinstance(fault, Unreachable):
            found = f"there is no local folder {text}, and the Hub cannot be reached to look for a repository: "
            hint = "check the path; or, for a repository, the connection and HF_ENDPOINT"
            raise InputError(found + fault.message, hint) from None
        found = f"neither a local folder nor a repository on the Hub is named {text}: {fault.message}"
        raise InputError(found, f"check the path; or {fault.hint}") from None
