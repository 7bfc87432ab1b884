"""Headers of a GGUF on the Hub, read by ranges."""

from __future__ import annotations

from pathlib import Path

from kimi_gguf.hub.address import HubAddress, parse_address
from kimi_gguf.hub.repository import Repository, open_repository
from quant.errors import InputError, UsageError
from quant.gguf_parser import GgufHeader, parse_gguf_from
from quant.gguf_split import GgufSet, parse_split_name, read_gguf_set

_FIRST_READ = 1 << 18
_SHOWN = 8


def read_hub_gguf(text: str) -> GgufSet:
    """The headers of the model that an address stands for, as ``open_hub_gguf``."""
    return open_hub_gguf(text)[1]


def open_hub_gguf(text: str) -> tuple[Repository, GgufSet]:
    """The model that an address stands for: its repository, and its headers with the paths in the repository.

    Args:
        text: of a GGUF file, or of a repository or folder that holds one model.

    Raises:
        UsageError: no address, or of a place with several models.
        InputError: no GGUF there, an unsound one, or the Hub cannot be reached.
    """
    address = parse_address(text)
    if address is None:
        raise UsageError(f"{text} is not an address on the Hub", "write hf://owner/name/file.gguf")
    repository = open_repository(address, first_contact=True)
    files = read_gguf_set(
        Path(_choose(repository, address)),
        lambda path: _parse(repository, path.as_posix()),
        lambda path: path.as_posix() in repository.files,
    )
    return repository, files


def _parse(repository: Repository, path: str) -> GgufHeader:
    return parse_gguf_from(
        lambda offset, length: repository.read(path, offset, length),
        repository.files[path].nbytes,
        f"{repository.address.repo}/{path}",
        first_read=_FIRST_READ,
    )


def _choose(repository: Repository, address: HubAddress) -> str:
    """The file that ``address`` names, or the first of the only model below it."""
    path = address.path.strip("/")
    if path in repository.files:
        return path
    inside = f"{path}/" if path else ""
    found = sorted(p for p in repository.files if p.endswith(".gguf") and p.startswith(inside))
    firsts = [p for p in found if (parse_split_name(p) or ("", 0, 0))[1] == 0]
    if len(firsts) == 1:
        return firsts[0]
    if not firsts:
        raise InputError(f"{address}: no GGUF file there", f"it has {len(repository.files)} files of other kinds")
    shown = ", ".join(firsts[:_SHOWN]) + (" ..." if len(firsts) > _SHOWN else "")
    raise UsageError(f"{address} holds {len(firsts)} models: {shown}", f"name one: hf://{address.repo}/{firsts[0]}")
