"""The bytes of a GGUF, wherever it is: files on disk, or ranges of files on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quant.errors import InputError
from quant.gguf_split import GgufSet, read_gguf_set

if TYPE_CHECKING:
    from kimi_gguf.hub.repository import Repository


class GgufBytes(Protocol):
    """Reads the files of a set; safe from several threads."""

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` from file ``number`` of the set, from byte ``offset``."""
        ...

    def close(self) -> None: ...


class FilesOnDisk:
    """``GgufBytes`` of files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        while len(view):
            count = os.preadv(self._descriptors[number], [view], offset)
            if not count:
                raise InputError(f"{self._paths[number]}: the file ends at byte {offset}", "copy or convert it again")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class FilesOnHub:
    """``GgufBytes`` of files in a repository, by exact ranges."""

    def __init__(self, repository: Repository, paths: Sequence[Path]) -> None:
        self._repository = repository
        self._names = [path.as_posix() for path in paths]

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        view[:] = self._repository.read(self._names[number], offset, len(view))

    def close(self) -> None:
        self._repository.transport.stop.set()


@dataclass(frozen=True, slots=True)
class OpenGguf:
    """A GGUF that can be read; ``repository`` is where it is, when it is on the Hub."""

    files: GgufSet
    content: GgufBytes
    repository: Repository | None = None


@contextmanager
def open_gguf(model: str | os.PathLike[str]) -> Iterator[OpenGguf]:
    """Open a file, any file of a split set, or ``hf://owner/name/FOLDER``.

    Raises:
        InputError: there is none, or it is unsound.
    """
    text = os.fspath(model)
    if text.startswith("hf://") and not Path(text).exists():
        from kimi_gguf.hub.gguf import open_hub_gguf

        repository, files = open_hub_gguf(text)
        opened = OpenGguf(files, FilesOnHub(repository, files.paths), repository)
    else:
        files = read_gguf_set(Path(model))
        opened = OpenGguf(files, FilesOnDisk(files.paths))
    try:
        yield opened
    finally:
        opened.content.close()
