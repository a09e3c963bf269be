"""A web server on loopback that serves bytes with ranges, and can be told to fail."""

from __future__ import annotations

import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest


class WebServer:
    """Serves `files` by path. `faults` are used up, one an asked-for body: a status to answer, or how many bytes to break off after."""

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
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range") or "") if self.ranges else None
        start, end = (int(asked[1]), min(int(asked[2]) + 1, len(content))) if asked else (0, len(content))
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
