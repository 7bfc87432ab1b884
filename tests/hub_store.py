"""Repositories of the test Hub in a folder: they outlive a server that is killed.

objects/NAME            content, named by its SHA-256; files of a test are linked, not copied
repos/OWNER--NAME.json  refs, commits (parent, title, files by path), who may see it
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from threading import RLock
from typing import Any

LARGE = (".safetensors", ".gguf", ".bin", ".model", ".imatrix")
REGULAR_BYTES = 10_000_000


class HubFault(Exception):
    """An answer of the Hub that is no success: status, error code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blob_id_of(data: bytes) -> str:
    """Name of a git blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class HubStore:
    """All repositories below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = RLock()
        for name in ("objects", "repos", "uploads"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def object(self, name: str) -> Path:
        return self.root / "objects" / name

    def put(self, data: bytes) -> str:
        """Store small content; its SHA-256."""
        name = hashlib.sha256(data).hexdigest()
        if not self.object(name).exists():
            temporary = self.root / "uploads" / f"{name}.{os.getpid()}"
            temporary.write_bytes(data)
            temporary.replace(self.object(name))
        return name

    def create(self, repo: str, *, private: bool = False, gated: bool = False) -> None:
        with self.lock:
            if self._path(repo).exists():
                raise HubFault(409, "", "You already created this model repo")
            first = {"parent": None, "title": "initial commit", "files": {}}
            state = {"private": private, "gated": gated, "refs": {}, "commits": {}}
            state["refs"]["main"] = self._add_commit(state, first)
            self._save(repo, state)

    def add_folder(self, repo: str, folder: Path, *, title: str = "upload", **kind: bool) -> str:
        """A commit that adds the files of ``folder``, by links; makes the repository if needed. Its id."""
        if not self._path(repo).exists():
            self.create(repo, **kind)
        files = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = sha256_of(path)
            if not self.object(name).exists():
                self.object(name).symlink_to(path.resolve())
            files[path.relative_to(folder).as_posix()] = self.entry(path.name, name)
        return self.commit(repo, "main", title, files)

    def entry(self, path: str, name: str, *, large: bool | None = None) -> dict[str, Any]:
        """What a commit says of a file whose content is the object ``name``."""
        size = self.object(name).stat().st_size
        large = self.is_large(path, size) if large is None else large
        if large:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{name}\nsize {size}\n".encode()
            return {"size": size, "object": name, "oid": blob_id_of(pointer), "lfs": len(pointer)}
        return {"size": size, "object": name, "oid": blob_id_of(self.object(name).read_bytes()), "lfs": 0}

    @staticmethod
    def is_large(path: str, size: int) -> bool:
        return size > 0 and (path.endswith(LARGE) or size > REGULAR_BYTES)

    def commit(
        self,
        repo: str,
        branch: str,
        title: str,
        files: dict[str, Any],
        deleted: tuple[str, ...] = (),
        parent: str | None = None,
    ) -> str:
        """Add a commit to a branch: files added and replaced, paths and folders (``x/``) deleted."""
        with self.lock:
            state = self.load(repo)
            if branch not in state["refs"]:
                raise HubFault(404, "RevisionNotFound", f"Invalid rev id: {branch}")
            head = state["refs"][branch]
            if parent is not None and parent != head:
                raise HubFault(412, "", "A commit has happened since. Please refresh and try again.")
            kept = {
                path: entry
                for path, entry in state["commits"][head]["files"].items()
                if not any(path == d or (d.endswith("/") and path.startswith(d)) for d in deleted)
            }
            commit = {"parent": head, "title": title, "files": kept | files}
            state["refs"][branch] = self._add_commit(state, commit)
            self._save(repo, state)
            return str(state["refs"][branch])

    def branch(self, repo: str, name: str, start: str | None) -> None:
        with self.lock:
            state = self.load(repo)
            if name in state["refs"]:
                raise HubFault(409, "", f"Reference already exists: {name}")
            state["refs"][name] = self.resolve(repo, start or "main")[0]
            self._save(repo, state)

    def resolve(self, repo: str, revision: str) -> tuple[str, dict[str, Any]]:
        """Id of a commit, and its files by path."""
        state = self.load(repo)
        commit = state["refs"].get(revision, revision)
        if commit not in state["commits"]:
            raise HubFault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, state["commits"][commit]["files"]

    def load(self, repo: str) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(self._path(repo).read_text())
        except FileNotFoundError:
            raise HubFault(404, "RepoNotFound", "Repository not found") from None
        return state

    def history(self, repo: str, revision: str) -> list[dict[str, Any]]:
        """Commits from ``revision`` back, as the Hub lists them."""
        commits = self.load(repo)["commits"]
        at: str | None = self.resolve(repo, revision)[0]
        found = []
        while at is not None:
            entry = {"id": at, "title": commits[at]["title"], "message": "", "authors": [{"user": "tester"}]}
            found.append(entry | {"date": "2026-01-01T00:00:00.000Z"})
            at = commits[at]["parent"]
        return found

    def _add_commit(self, state: dict[str, Any], commit: dict[str, Any]) -> str:
        text = json.dumps([len(state["commits"]), commit], sort_keys=True)
        name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        state["commits"][name] = commit
        return name

    def _path(self, repo: str) -> Path:
        return self.root / "repos" / (repo.replace("/", "--") + ".json")

    def _save(self, repo: str, state: dict[str, Any]) -> None:
        temporary = self._path(repo).with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(self._path(repo))
