"""Servers on loopback: of the web, with ranges and told to fail; of Hugging Face data sets, with
the layout of the real one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import urllib.parse
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


class WebServer:
    """Serves `files` by path. `faults` are used up, one an asked-for body: a status to answer, or
    how many bytes to break off after.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.faults: list[int | str] = []
        self.statuses: dict[str, int] = {}
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []
        self.address = ""

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = handler.path.partition("?")[0]
        content = self.files.get(path)
        if path in self.statuses or content is None:
            handler.send_error(self.statuses.get(path, 404))
            return
        asked = (
            re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range") or "")
            if self.ranges
            else None
        )
        start, end = (
            (int(asked[1]), min(int(asked[2]) + 1, len(content))) if asked else (0, len(content))
        )
        fault = None
        if body:
            self.asked.append((path, handler.headers.get("Range")))
            fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, str):
            handler.send_error(int(fault))
            return
        piece = content[start:end]
        handler.send_response(206 if asked else 200)
        if asked:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        handler.send_header("X-Repo-Commit", HubServer.COMMIT)
        handler.send_header("ETag", self.tags.get(path, f'"{hash(content)}"'))
        sent = piece if fault is None else piece[:fault]
        handler.send_header("Content-Length", str(len(sent)))
        handler.end_headers()
        if body:
            handler.wfile.write(sent)

    @contextmanager
    def running(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self):
                outer.answer(self, body=True)

            def do_HEAD(self):
                outer.answer(self, body=False)

            def do_POST(self):
                outer.answer(self, body=True)

            def log_message(self, *words):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.address = f"http://127.0.0.1:{server.server_port}"
            thread = Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


@pytest.fixture
def web():
    """A running WebServer."""
    pytest.importorskip("aiohttp")
    with WebServer().running() as server:
        yield server


@pytest.fixture
def memory():
    """An empty filesystem in this process's memory, at memory://."""
    import fsspec

    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


class HubServer(WebServer):
    """A Hugging Face hub of data sets: `put` a file into a repository. Each repository has one
    commit, which its `main` is.
    """

    COMMIT = "c0ffee" + "0" * 34

    def __init__(self) -> None:
        super().__init__()
        self.commits: dict[str, str] = {}

    def put(self, repository: str, path: str, content: bytes, *, commit: str = COMMIT) -> None:
        self.commits[repository] = commit
        self.files[f"/datasets/{repository}/resolve/{commit}/{path}"] = content

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        found = re.fullmatch(
            r"/api/datasets/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?",
            handler.path.partition("?")[0],
        )
        if found is None:
            repository = "/".join(handler.path.split("/")[2:4])
            handler.path = handler.path.replace(
                "/resolve/main/", f"/resolve/{self.commits.get(repository)}/"
            )
            if handler.path.partition("?")[0] in self.files:
                super().answer(handler, body=body)
            else:
                self._json(handler, {"error": "not found"}, 404, "EntryNotFound")
            return
        repository, kind, revision, path = found.groups()
        commit = self.commits.get(repository)
        root = f"/datasets/{repository}/resolve/{commit}/"
        paths = [name.removeprefix(root) for name in self.files if name.startswith(root)]
        if not paths or revision not in (None, "main", commit):
            missing = "RepoNotFound" if not paths else "RevisionNotFound"
            self._json(handler, {"error": "not found"}, 404, missing)
        elif kind == "tree":
            path = urllib.parse.unquote(path or "")
            folder = f"{path}/" if path else ""
            inside = {name.removeprefix(folder) for name in paths if name.startswith(folder)}
            if path and not inside:
                self._json(handler, {"error": "not found"}, 404, "EntryNotFound")
                return
            recursive = "recursive=True" in handler.path or "recursive=true" in handler.path
            entries = {name if recursive else name.partition("/")[0] for name in inside}
            entries |= {parent for name in inside if recursive for parent in parents(name)}
            self._json(handler, [self._described(root, folder + name) for name in sorted(entries)])
        elif kind == "paths-info":
            asked = handler.rfile.read(int(handler.headers["Content-Length"])).decode()
            self._json(
                handler,
                [
                    self._described(root, name)
                    for name in paths
                    if name in urllib.parse.unquote_plus(asked)
                ],
            )
        else:
            siblings = [{"rfilename": name} for name in paths]
            self._json(
                handler,
                {
                    "_id": "1",
                    "id": repository,
                    "sha": commit,
                    "siblings": siblings,
                    "tags": [],
                    "private": False,
                },
            )

    def _described(self, root: str, name: str) -> dict[str, object]:
        content = self.files.get(root + name)
        if content is None:
            return {
                "type": "directory",
                "oid": hashlib.sha1(name.encode()).hexdigest(),
                "size": 0,
                "path": name,
            }
        sha256 = hashlib.sha256(content).hexdigest()
        large = (
            {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}}
            if name.endswith(".parquet")
            else {}
        )
        return {
            "type": "file",
            "oid": hashlib.sha1(content).hexdigest(),
            "size": len(content),
            "path": name,
        } | large

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


@pytest.fixture
def parquet():
    """Return columns as the bytes of a Parquet file: `parquet({"text": [...]}, row_group_size=10)`."""
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def make(columns, **options):
        file = io.BytesIO()
        tables.write_table(pyarrow.table(columns), file, **options)
        return file.getvalue()

    return make


@pytest.fixture
def hub():
    """A running HubServer."""
    with HubServer().running() as server:
        yield server


@pytest.fixture
def ask_hub(hub, tmp_path):
    """Run a program in a Python whose hub is the HubServer, and return what it prints as JSON; the
    libraries read its address when imported.
    """

    def ask(program: str, *words: str) -> object:
        home = {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        environment = (
            os.environ
            | home
            | {"HF_ENDPOINT": hub.address, "PYTHONPATH": str(Path(__file__).parents[2])}
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask
