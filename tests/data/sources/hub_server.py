"""A Hugging Face hub of datasets on loopback, with the layout of the real one."""

import hashlib
import json
import re
import urllib.parse
from http.server import BaseHTTPRequestHandler

from web_server import WebServer


class HubServer(WebServer):
    """Serves the repositories that files were `put` into. Each has one commit, its `main`.

    Files put at CONVERTED are in the branch that the hub converts to Parquet.
    """

    COMMIT = "c0ffee" + "0" * 34
    CONVERTED = "decade" + "0" * 34

    def __init__(self) -> None:
        super().__init__()
        self.headers = {"X-Repo-Commit": self.COMMIT}
        self.commits: dict[str, str] = {}

    def put(self, repository: str, path: str, content: bytes, *, commit: str = COMMIT) -> None:
        if commit != self.CONVERTED:
            self.commits[repository] = commit
        self.files[f"/datasets/{repository}/resolve/{commit}/{path}"] = content

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        found = re.fullmatch(
            r"/api/datasets/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?",
            handler.path.partition("?")[0],
        )
        if found is None:
            self._answer_file(handler, body=body)
            return
        repository, kind, revision, path = found.groups()
        revision = urllib.parse.unquote(revision or "main")
        is_converted = revision in ("refs/convert/parquet", self.CONVERTED)
        commit = self.CONVERTED if is_converted else self.commits.get(repository)
        root = f"/datasets/{repository}/resolve/{commit}/"
        paths = [name.removeprefix(root) for name in self.files if name.startswith(root)]
        known = ("main", commit, "refs/convert/parquet")
        if not paths or revision not in known:
            missing = "RevisionNotFound" if repository in self.commits else "RepoNotFound"
            self._json(handler, {"error": "not found"}, 404, missing)
        elif kind == "tree":
            self._answer_tree(handler, root, paths, urllib.parse.unquote(path or ""))
        elif kind == "paths-info":
            asked = handler.rfile.read(int(handler.headers["Content-Length"])).decode()
            asked = urllib.parse.unquote_plus(asked)
            self._json(handler, [self._describe(root, name) for name in paths if name in asked])
        else:
            repository_info = {"_id": "1", "id": repository, "sha": commit, "private": False}
            siblings = [{"rfilename": name} for name in paths]
            self._json(handler, repository_info | {"siblings": siblings, "tags": []})

    def _answer_file(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        repository = "/".join(handler.path.split("/")[2:4])
        handler.path = handler.path.replace(
            "/resolve/main/", f"/resolve/{self.commits.get(repository)}/"
        )
        if handler.path.partition("?")[0] in self.files:
            super().answer(handler, body=body)
        else:
            self._json(handler, {"error": "not found"}, 404, "EntryNotFound")

    def _answer_tree(
        self, handler: BaseHTTPRequestHandler, root: str, paths: list[str], path: str
    ) -> None:
        folder = f"{path}/" if path else ""
        inside = {name.removeprefix(folder) for name in paths if name.startswith(folder)}
        if path and not inside:
            self._json(handler, {"error": "not found"}, 404, "EntryNotFound")
            return
        recursive = "recursive=true" in handler.path.lower()
        entries = {name if recursive else name.partition("/")[0] for name in inside}
        entries |= {parent for name in inside if recursive for parent in parents(name)}
        self._json(handler, [self._describe(root, folder + name) for name in sorted(entries)])

    def _describe(self, root: str, name: str) -> dict[str, object]:
        content = self.files.get(root + name)
        if content is None:
            oid = hashlib.sha1(name.encode()).hexdigest()
            return {"type": "directory", "oid": oid, "size": 0, "path": name}
        oid, size = hashlib.sha1(content).hexdigest(), len(content)
        described: dict[str, object] = {"type": "file", "oid": oid, "size": size, "path": name}
        if name.endswith(".parquet"):
            sha256 = hashlib.sha256(content).hexdigest()
            described["lfs"] = {"oid": sha256, "size": size, "pointerSize": 130}
        return described

    def _json(
        self,
        handler: BaseHTTPRequestHandler,
        value: object,
        status: int = 200,
        code: str | None = None,
    ) -> None:
        data = json.dumps(value).encode()
        handler.send_response(status)
        if code:
            handler.send_header("X-Error-Code", code)
            handler.send_header("X-Repo-Commit", self.COMMIT)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)


def parents(name: str) -> list[str]:
    pieces = name.split("/")[:-1]
    return ["/".join(pieces[: count + 1]) for count in range(len(pieces))]
