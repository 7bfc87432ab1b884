"""A Hub on loopback: the HTTP API as huggingface_hub 2.4 uses it without xet, with faults on demand.

In a test's own process (``HF_ENDPOINT`` is set by ``conftest.py`` before the library is imported):

    hub.store.add_folder("org/model", folder)
    hub.fault("GET .*resolve", "status", status=429, headers={"Retry-After": "1"}, times=2)
    [r.path for r in hub.requests if r.authorization]

As a process of its own, to be killed: ``python tests/hub_server.py ROOT PORT [FAULTS-AS-JSON]``.

Large files are served as the Hub does: ``resolve`` redirects to signed addresses on another host (here ``localhost``
beside 127.0.0.1), which must never see a token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_store import HubFault, HubStore, sha256_of

TOKEN = "hf_" + "testtokenforloopback" * 2
SIGNATURE = "X-Signature=not-to-be-shown"
CHUNK = 1 << 16

Kind = Literal["status", "drop", "cut", "short", "whole", "flip", "late", "hang", "slow"]


@dataclass
class Fault:
    """What goes wrong with the ``times`` requests after the first ``skip`` whose "METHOD /path" matches.

    status  answered by ``status`` and ``headers``, nothing done
    late    done, then answered by ``status``
    drop    the connection is closed without an answer
    cut     the connection is closed after ``at`` bytes of the answer's body (of an upload's: of the request's body)
    short   a range ends ``at`` bytes after its begin, and the answer says so
    whole   the range is ignored: 200 and everything
    flip    the byte at offset ``at`` of the file is another one
    hang    nothing is said for ``seconds``
    slow    ``rate`` bytes a second
    """

    match: str
    kind: Kind
    times: int = 1
    skip: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    at: int = 0
    seconds: float = 0.0
    rate: int = 1 << 20


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    host: str
    range: str | None
    authorization: str | None


@dataclass
class Answer:
    status: int = 200
    body: bytes | Path = b""
    headers: dict[str, str] = field(default_factory=dict)
    filename: str = ""


def as_json(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


class HubServer(ThreadingHTTPServer):
    """Serves ``store``; ``multipart`` makes uploads above that many bytes go in parts of that size."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.connections: set[socket.socket] = set()
        self.store = HubStore(root)
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens = {TOKEN: "tester"}
        self.multipart: int | None = None
        self.lock = Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, match: str, kind: Kind, **how: Any) -> Fault:
        """Let a fault happen to requests that come from now on."""
        fault = Fault(match, kind, **how)
        self.faults.append(fault)
        return fault

    def due(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, request):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def start(self) -> HubServer:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        # A client that keeps a connection must not meet this Hub in the next test.
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.length = int(self.headers.get("Content-Length") or 0)
        seen = Request(
            self.command, unquote(url.path), self.headers["Host"], self.headers["Range"], self.headers["Authorization"]
        )
        self.server.requests.append(seen)
        fault = self.server.due(f"{self.command} {unquote(url.path)}")
        kind = fault.kind if fault else None
        if fault and kind == "hang":
            time.sleep(fault.seconds)
        if kind == "drop":
            self._hang_up()
            return
        if fault and kind == "cut" and self.length:
            self.rfile.read(fault.at)
            self._hang_up()
            return
        try:
            if fault and kind == "status":
                self.rfile.read(self.length)
                answer = self._fault_answer(fault)
            else:
                answer = self._route(url.path)
                if fault and kind == "late":
                    answer = self._fault_answer(fault)
        except HubFault as error:
            answer = self._error(error)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(answer, fault)

    def _fault_answer(self, fault: Fault) -> Answer:
        return as_json({"error": f"injected {fault.status}"}, fault.status, **fault.headers)

    def _error(self, error: HubFault) -> Answer:
        headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
        return as_json({"error": error.message}, error.status, **headers)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        size = answer.body.stat().st_size if isinstance(answer.body, Path) else len(answer.body)
        begin, end, status = 0, size, answer.status
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if status == 200 and wanted and kind != "whole" and self.command in ("GET", "HEAD"):
            begin, end = int(wanted[1]), min(size, int(wanted[2]) + 1 if wanted[2] else size)
            if begin >= size:
                answer, status, begin, end = Answer(416, b"", {"Content-Range": f"bytes */{size}"}), 416, 0, 0
            else:
                if fault and kind == "short":
                    end = min(end, begin + fault.at)
                status = 206
                answer.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.send_response(status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(answer.body, begin, end, fault)

    def _send_body(self, body: bytes | Path, begin: int, end: int, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        stop = begin + fault.at if fault and kind == "cut" else end
        file = body.open("rb") if isinstance(body, Path) else None
        if file:
            file.seek(begin)
        at = begin
        while at < min(stop, end):
            n = min(CHUNK, min(stop, end) - at)
            data = file.read(n) if file else bytes(body[at : at + n])  # type: ignore[index]
            if fault and kind == "flip" and at <= fault.at < at + n:
                changed = bytearray(data)
                changed[fault.at - at] ^= 1
                data = bytes(changed)
            if fault and kind == "slow":
                time.sleep(n / fault.rate)
            self.wfile.write(data)
            at += n
        if stop < end:
            self._hang_up()

    def _route(self, path: str) -> Answer:
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
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("GET", f"/api/models/{_REPO}", Handler.info),
    ("GET", f"/api/models/{_REPO}/revision/{_REV}", Handler.info),
    ("GET", f"/api/models/{_REPO}/refs", Handler.refs),
    ("GET", f"/api/models/{_REPO}/commits/{_REV}", Handler.commits),
    ("GET", f"/api/models/{_REPO}/tree/{_REV}(?P<path>/.*)?", Handler.tree),
    ("POST", f"/api/models/{_REPO}/paths-info/{_REV}", Handler.paths_info),
    ("GET HEAD", f"/{_REPO}/resolve/{_REV}/(?P<path>.+)", Handler.resolve),
    ("GET HEAD", r"/cdn/(?P<name>[0-9a-f]{64})/(?P<path>.+)", Handler.cdn),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", f"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", Handler.branch),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{_REPO}/preupload/{_REV}", Handler.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/upload/(?P<oid>[0-9a-f]{64})(/(?P<part>\d+))?", Handler.upload),
    ("POST", r"/complete/(?P<oid>[0-9a-f]{64})", Handler.complete),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", Handler.verify),
    ("POST", f"/api/models/{_REPO}/commit/{_REV}", Handler.commit),
]


if __name__ == "__main__":
    server = HubServer(Path(sys.argv[1]), int(sys.argv[2]))
    server.faults = [Fault(**fault) for fault in json.loads(sys.argv[3] if len(sys.argv) > 3 else "[]")]
    sys.stdout.write(f"{server.endpoint}\n")
    sys.stdout.flush()
    server.serve_forever()
