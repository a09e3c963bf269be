"""A web server on loopback that can be told to fail, and fixtures for remote filesystems."""

import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest


class WebServer:
    """Serves `files` by path.

    Each requested body uses up one of `faults`: a status to answer with, or the number of bytes
    after which the response ends; None is no fault.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.faults: list[int | str | None] = []
        self.statuses: dict[str, int] = {}
        self.ranges = True
        self.headers: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.address = ""

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = handler.path.partition("?")[0]
        content = self.files.get(path)
        if path in self.statuses or content is None:
            handler.send_error(self.statuses.get(path, 404))
            return
        requested = handler.headers.get("Range")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", requested or "") if self.ranges else None
        start, end = (
            (int(asked[1]), min(int(asked[2]) + 1, len(content))) if asked else (0, len(content))
        )
        fault = None
        if body:
            self.asked.append((path, requested))
            fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, str):
            handler.send_error(int(fault))
            return
        sent = content[start:end][:fault]
        handler.send_response(206 if asked else 200)
        if asked:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        tag = {"ETag": self.tags.get(path, f'"{hash(content)}"'), "Content-Length": str(len(sent))}
        for name, value in (self.headers | tag).items():
            handler.send_header(name, value)
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
