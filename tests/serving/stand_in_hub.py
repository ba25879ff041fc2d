"""A local server with the endpoints of the Hub that pushing uses: repositories in memory, no network."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

TOKEN = "hf_" + "secretsecretsecretsecret"
LFS_SIZE = 2000
"""Files of at least so many bytes go through LFS here."""


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What was sent so far."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=lambda: {f"Bearer {TOKEN}": "me"})
    writable: tuple[str, ...] = ("me", "org")

    def save(self, name: str, folder: Path, branch: str = "main") -> Path:
        """The files of a repository, as somebody else would download them."""
        folder.mkdir()
        for path, data in self.repositories[name].branches[branch].items():
            (folder / path).write_bytes(data)
        return folder


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, data: Any = None, status: int = 200, **headers: str) -> None:
        body = json.dumps(data if data is not None else {}).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _serve(self) -> None:
        body, path = self._body(), self.path.split("?")[0].strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        if path.startswith("upload/"):
            self.hub.blobs[path.removeprefix("upload/")] = body
            return self._answer()
        user = self.hub.users.get(self.headers.get("Authorization", ""))
        if user is None:
            return self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        if path == "api/whoami-v2":
            return self._answer({"type": "user", "name": user})
        if path == "api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path == "api/repos/create":
            return self._create(user, json.loads(body))
        words = path.split("/")
        name = "/".join(words[2:4]) if words[0] == "api" else "/".join(words[:2]).removesuffix(".git")
        if (repository := self.hub.repositories.get(name)) is None:
            return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        what, rest = (words[4:5] or [""])[0], "/".join(words[5:])
        if words[0] != "api":
            return self._batch(json.loads(body))
        if what == "branch":
            repository.branches.setdefault(rest, dict(repository.branches["main"]))
            return self._answer()
        if what == "settings":
            repository.private = (
                json.loads(body)["private"]
                if "private" in json.loads(body)
                else (json.loads(body)["visibility"] == "private")
            )
            return self._answer({"private": repository.private})
        if what == "preupload":
            files = json.loads(body)["files"]
            modes = ({"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_SIZE else "regular"} for f in files)
            return self._answer({"files": [mode | {"shouldIgnore": False} for mode in modes]})
        if what == "commit":
            return self._commit(name, repository, rest, body)
        return self._answer({"id": name, "private": repository.private, "sha": "0" * 40, "siblings": [], "tags": []})

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _create(self, user: str, body: dict[str, Any]) -> None:
        owner = body.get("organization") or user
        name = f"{owner}/{body['name']}"
        if owner not in self.hub.writable:
            return self._answer({"error": f"You don't have the rights to create a model under {owner}"}, 403)
        if name in self.hub.repositories:
            return self._answer({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        private = body.get("visibility") == "private" or bool(body.get("private"))
        self.hub.repositories[name] = Repository(private)
        return self._answer({"url": f"{self.hub.url}/{name}", "name": name})

    def _validate(self, content: str) -> None:
        told = yaml.safe_load(content.split("---\n")[1])
        errors = [] if told.get("license") in (None, "mit", "apache-2.0") else [{"message": '"license" must be known'}]
        self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _batch(self, body: dict[str, Any]) -> None:
        objects = []
        for wanted in body["objects"]:
            there = wanted["oid"] in self.hub.blobs
            actions = {"upload": {"href": f"{self.hub.url}/upload/{wanted['oid']}"}}
            objects.append({**wanted, **({} if there else {"actions": actions})})
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, branch: str, body: bytes) -> None:
        files = repository.branches[branch]
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                blob = self.hub.blobs[value["oid"]]
                assert hashlib.sha256(blob).hexdigest() == value["oid"]
                files[value["path"]] = blob
        oid = hashlib.sha1(body).hexdigest()
        told = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "hookOutput": ""}
        self._answer(told)


@contextmanager
def stand_in_hub() -> Iterator[Hub]:
    """A running server, and what it was sent."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
