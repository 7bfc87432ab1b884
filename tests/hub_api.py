"""What the test Hub answers: the routes of huggingface_hub 2.4 without xet, over a ``HubStore``."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from io import BufferedIOBase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from hub_store import HubFault, HubStore, sha256_of

SIGNATURE = "X-Signature=not-to-be-shown"
CHUNK = 1 << 16


@dataclass
class Answer:
    status: int = 200
    body: bytes | Path = b""
    headers: dict[str, str] = field(default_factory=dict)
    filename: str = ""


def as_json(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


class HubApi:
    """One request. Methods of ``ROUTES`` answer it, or raise ``HubFault``."""

    server: Any
    command: str
    headers: Message
    rfile: BufferedIOBase
    query: dict[str, list[str]]
    length: int

    def route(self, path: str) -> Answer:
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return function(self, **{k: unquote(v or "") for k, v in match.groupdict().items()})
        raise HubFault(404, "", f"no such route: {self.command} {path}")

    def _json(self) -> Any:
        return json.loads(self.rfile.read(self.length) or b"{}")

    def _user(self) -> str | None:
        given = self.headers["Authorization"]
        if given is None:
            return None
        user = self.server.tokens.get(given.removeprefix("Bearer "))
        if user is None:
            raise HubFault(401, "", "Invalid credentials in Authorization header")
        return user

    def _may(self, repo: str, *, write: bool = False, content: bool = False) -> HubStore:
        user = self._user()
        if write and user is None:
            raise HubFault(401, "", "Invalid username or password.")
        state = self.server.store.load(repo)
        if state["private"] and user is None:
            raise HubFault(401, "RepoNotFound", "Repository not found")
        if state["gated"] and content and user is None:
            message = f"Access to model {repo} is restricted. You must have access to it and be authenticated."
            raise HubFault(401, "GatedRepo", message)
        return self.server.store

    def whoami(self) -> Answer:
        user = self._user()
        if user is None:
            raise HubFault(401, "", "Invalid username or password.")
        return as_json({"type": "user", "name": user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def info(self, repo: str, revision: str = "main") -> Answer:
        commit, files = self._may(repo).resolve(repo, revision or "main")
        siblings = []
        for path, entry in files.items():
            item: dict[str, Any] = {"rfilename": path}
            if "blobs" in self.query:
                item |= {"size": entry["size"], "blobId": entry["oid"]}
                if entry["lfs"]:
                    item["lfs"] = {"sha256": entry["object"], "size": entry["size"], "pointerSize": entry["lfs"]}
            siblings.append(item)
        state = self.server.store.load(repo)
        facts = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
        return as_json(facts | {"private": state["private"], "gated": "manual" if state["gated"] else False})

    def refs(self, repo: str) -> Answer:
        self._may(repo)
        heads = self.server.store.load(repo)["refs"]
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in heads.items()]
        return as_json({"branches": branches, "tags": [], "converts": []})

    def commits(self, repo: str, revision: str) -> Answer:
        return as_json(self._may(repo).history(repo, revision))

    def tree(self, repo: str, revision: str, path: str = "") -> Answer:
        _, files = self._may(repo).resolve(repo, revision)
        inside = path.strip("/") + "/" if path else ""
        found = {p: e for p, e in files.items() if p.startswith(inside)}
        if inside and not found:
            raise HubFault(404, "EntryNotFound", f"{path} does not exist on {revision!r}")
        recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        entries = [_tree_file(p, e) for p, e in found.items() if recursive or "/" not in p[len(inside) :]]
        folders = {p.rpartition("/")[0] for p in found if "/" in p[len(inside) :]}
        return as_json([{"type": "directory", "path": f, "oid": "0" * 40} for f in sorted(folders)] + entries)

    def paths_info(self, repo: str, revision: str) -> Answer:
        form = parse_qs(self.rfile.read(self.length).decode())
        _, files = self._may(repo).resolve(repo, revision)
        return as_json([_tree_file(p, files[p]) for p in form.get("paths", []) if p in files])

    def resolve(self, repo: str, revision: str, path: str) -> Answer:
        commit, files = self._may(repo, content=True).resolve(repo, revision)
        if path not in files:
            raise HubFault(404, "EntryNotFound", "Entry not found")
        entry = files[path]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not entry["lfs"]:
            headers |= {"ETag": f'"{entry["oid"]}"', "X-Linked-Size": str(entry["size"])}
            return Answer(200, self.server.store.object(entry["object"]), headers)
        headers |= {"X-Linked-Size": str(entry["size"]), "X-Linked-ETag": f'"{entry["object"]}"'}
        headers["Location"] = self._signed(f"/cdn/{entry['object']}/{quote(path)}")
        return Answer(302, b"", headers)

    def _signed(self, path: str) -> str:
        return f"http://localhost:{self.server.server_address[1]}{path}?{SIGNATURE}"

    def cdn(self, name: str, path: str) -> Answer:
        self._check_signed()
        return Answer(200, self.server.store.object(name), {"ETag": f'"{name}"', "Accept-Ranges": "bytes"})

    def _check_signed(self) -> None:
        if self.query.get("X-Signature") != [SIGNATURE.partition("=")[2]] or self.headers["Authorization"]:
            raise HubFault(403, "", "SignatureDoesNotMatch")

    def create(self) -> Answer:
        asked = self._json()
        user = self._user()
        if user is None:
            raise HubFault(401, "", "Invalid username or password.")
        repo = f"{asked.get('organization') or user}/{asked['name']}"
        made = {"url": f"{self.server.endpoint}/{repo}", "name": repo, "id": repo}
        try:
            self.server.store.create(repo, private=asked.get("visibility") == "private")
        except HubFault as error:
            return as_json(made | {"error": error.message}, error.status)
        return as_json(made)

    def branch(self, repo: str, branch: str) -> Answer:
        self._may(repo, write=True).branch(repo, branch, self._json().get("startingPoint"))
        return as_json({})

    def validate(self) -> Answer:
        text = self._json()["content"]
        front = re.match(r"---\n(.*?\n)---(\n|$)", text, re.DOTALL)
        if not front:
            return as_json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
        import yaml

        try:
            data = yaml.safe_load(front[1])
        except yaml.YAMLError as error:
            return as_json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        errors = _card_errors(data)
        return as_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo: str, revision: str) -> Answer:
        store, asked = self._may(repo, write=True), self._json()
        _, files = store.resolve(repo, revision)
        answers = []
        for file in asked["files"]:
            large = store.is_large(file["path"], file["size"])
            found = files.get(file["path"])
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if found:
                answer["oid"] = found["object"] if found["lfs"] else found["oid"]
            answers.append(answer)
        return as_json({"files": answers})

    def batch(self, repo: str) -> Answer:
        store, asked = self._may(repo, write=True), self._json()
        objects = []
        for item in asked["objects"]:
            oid, size = item["oid"], item["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if not store.object(oid).exists():
                entry["actions"] = {"upload": self._upload_action(oid, size), "verify": self._verify_action(repo)}
            objects.append(entry)
        return as_json({"transfer": "basic", "objects": objects})

    def _upload_action(self, oid: str, size: int) -> dict[str, Any]:
        part = self.server.multipart
        if part is None or size <= part:
            return {"href": self._signed(f"/upload/{oid}")}
        count = -(-size // part)
        parts = {f"{n + 1:05d}": self._signed(f"/upload/{oid}/{n + 1}") for n in range(count)}
        return {"href": f"{self.server.endpoint}/complete/{oid}", "header": {"chunk_size": str(part), **parts}}

    def _verify_action(self, repo: str) -> dict[str, Any]:
        return {"href": f"{self.server.endpoint}/{repo}.git/info/lfs/verify"}

    def upload(self, oid: str, part: str = "") -> Answer:
        self._check_signed()
        store = self.server.store
        target = store.root / "uploads" / (f"{oid}.{part}" if part else oid)
        digest = hashlib.sha256()
        temporary = target.with_name(f"{target.name}.{id(self)}")
        left = self.length
        with temporary.open("wb") as file:
            while left and (data := self.rfile.read(min(left, CHUNK))):
                digest.update(data)
                file.write(data)
                left -= len(data)
        if left or (not part and digest.hexdigest() != oid):
            temporary.unlink()
            raise HubFault(400, "", "XAmzContentSHA256Mismatch")
        temporary.replace(target if part else store.object(oid))
        return Answer(200, b"", {"ETag": f'"{digest.hexdigest()}"'})

    def complete(self, oid: str) -> Answer:
        store, parts = self.server.store, self._json()["parts"]
        whole = store.root / "uploads" / f"{oid}.whole"
        with whole.open("wb") as file:
            for part in parts:
                piece = store.root / "uploads" / f"{oid}.{part['partNumber']}"
                if f'"{sha256_of(piece)}"' != part["etag"]:
                    raise HubFault(400, "", "InvalidPart")
                file.write(piece.read_bytes())
        if sha256_of(whole) != oid:
            raise HubFault(400, "", "the parts do not make the announced content")
        whole.replace(store.object(oid))
        return as_json({})

    def verify(self, repo: str) -> Answer:
        asked = self._json()
        found = self._may(repo, write=True).object(asked["oid"])
        if not found.exists() or found.stat().st_size != asked["size"]:
            raise HubFault(400, "", "the object has not been uploaded")
        return as_json({})

    def commit(self, repo: str, revision: str) -> Answer:
        store = self._may(repo, write=True)
        lines = [json.loads(line) for line in self.rfile.read(self.length).splitlines()]
        header: dict[str, Any] = {}
        files: dict[str, Any] = {}
        deleted: list[str] = []
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                header = value
            elif line["key"] == "file":
                files[value["path"]] = store.entry(
                    value["path"], store.put(base64.b64decode(value["content"])), large=False
                )
            elif line["key"] == "lfsFile":
                if not store.object(value["oid"]).exists():
                    raise HubFault(400, "", f"LFS pointer of {value['path']} points to a file that was not uploaded")
                files[value["path"]] = store.entry(value["path"], value["oid"], large=True)
            else:
                deleted.append(value["path"] + ("/" if line["key"] == "deletedFolder" else ""))
        commit = store.commit(repo, revision, header["summary"], files, tuple(deleted), header.get("parentCommit"))
        url = f"{self.server.endpoint}/{repo}/commit/{commit}"
        return as_json({"success": True, "commitOid": commit, "commitUrl": url})


def _tree_file(path: str, entry: dict[str, Any]) -> dict[str, Any]:
    found = {"type": "file", "path": path, "size": entry["size"], "oid": entry["oid"]}
    if entry["lfs"]:
        found["lfs"] = {"oid": entry["object"], "size": entry["size"], "pointerSize": entry["lfs"]}
    return found


def _card_errors(data: Any) -> list[dict[str, str]]:
    """The Hub's rules for a model card's front matter, as far as they are known to refuse."""
    if not isinstance(data, dict):
        return [{"message": "the front matter is not a mapping"}]
    errors = []
    if data.get("license") == "other" and not data.get("license_name"):
        errors.append({"message": '"license_name" is required when "license" is "other"'})
    for key in ("tags", "language"):
        given = data.get(key, [])
        if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(i, str) for i in given)):
            errors.append({"message": f'"{key}" must be a list of strings'})
    relations = ("adapter", "merge", "quantized", "finetune")
    if data.get("base_model_relation", "quantized") not in relations:
        errors.append({"message": f'"base_model_relation" must be one of {", ".join(relations)}'})
    return errors


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REV = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", HubApi.whoami),
    ("GET", f"/api/models/{_REPO}", HubApi.info),
    ("GET", f"/api/models/{_REPO}/revision/{_REV}", HubApi.info),
    ("GET", f"/api/models/{_REPO}/refs", HubApi.refs),
    ("GET", f"/api/models/{_REPO}/commits/{_REV}", HubApi.commits),
    ("GET", f"/api/models/{_REPO}/tree/{_REV}(?P<path>/.*)?", HubApi.tree),
    ("POST", f"/api/models/{_REPO}/paths-info/{_REV}", HubApi.paths_info),
    ("GET HEAD", f"/{_REPO}/resolve/{_REV}/(?P<path>.+)", HubApi.resolve),
    ("GET HEAD", r"/cdn/(?P<name>[0-9a-f]{64})/(?P<path>.+)", HubApi.cdn),
    ("POST", "/api/repos/create", HubApi.create),
    ("POST", f"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", HubApi.branch),
    ("POST", "/api/validate-yaml", HubApi.validate),
    ("POST", f"/api/models/{_REPO}/preupload/{_REV}", HubApi.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", HubApi.batch),
    ("PUT", r"/upload/(?P<oid>[0-9a-f]{64})(/(?P<part>\d+))?", HubApi.upload),
    ("POST", r"/complete/(?P<oid>[0-9a-f]{64})", HubApi.complete),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", HubApi.verify),
    ("POST", f"/api/models/{_REPO}/commit/{_REV}", HubApi.commit),
]
