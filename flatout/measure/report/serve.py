"""Follows live runs: serves their page on this machine, and tells it when they have moved on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flatout.errors import ConfigError, Terminated
from flatout.measure.report.page import render
from flatout.measure.report.reading import RunReader
from flatout.progress import SILENT, Progress

HOST = "127.0.0.1"
MIN_WAIT_S = 2.0
"""Least time between two questions of a page."""
MAX_SHARE = 0.1
"""Largest share of one core's time that rendering may take."""


class LivePage:
    """The page about runs that may still be training, rendered again after they have written."""

    def __init__(self, readers: Sequence[RunReader]) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._rendered: tuple[object, str] | None = None
        self._render_s = 0.0

    def version(self) -> dict[str, object]:
        """Return what changes with the runs' files, and how long the page waits before asking."""
        wait_s = max(MIN_WAIT_S, self._render_s / MAX_SHARE)
        return {"version": repr(self._signature()), "wait_ms": round(1e3 * wait_s)}

    def html(self) -> str:
        """Return the page as the runs are now."""
        with self._lock:
            signature = self._signature()
            if self._rendered is None or self._rendered[0] != signature:
                began_s = time.thread_time()  # a busy machine does not slow the page down
                runs = [reader.read() for reader in self._readers]
                page = render(runs, live=repr(signature))
                self._rendered = signature, page
                self._render_s = time.thread_time() - began_s
            return self._rendered[1]

    def _signature(self) -> tuple[object, ...]:
        return tuple(reader.signature() for reader in self._readers)


def make_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Return a server of `page` on this machine's own address; port 0 chooses a free one.

    Raises: ConfigError when the port is taken or not allowed.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(page))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"The report cannot be served on port {port}: {reason}.",
            fix="Choose another with --port; --port 0 takes a free one.",
        ) from error
    server.daemon_threads = True
    return server


def serve(page: LivePage, port: int, *, progress: Progress = SILENT) -> str:
    """Serve `page` until Ctrl+C, and return its address.

    Raises: ConfigError, as `make_server`.
    """
    with make_server(page, port) as server:
        url = f"http://{HOST}:{server.server_port}/"
        progress.say(f"The report is at {url}, on this machine only; Ctrl+C ends.")
        try:
            server.serve_forever()
        except Terminated:
            raise
        except KeyboardInterrupt:
            progress.say("The report is no longer served.")
        return url


def _handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers two paths, and only to pages that came from this address."""

        def do_GET(self) -> None:
            """Send the page or its version."""
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in {HOST, "localhost"}:  # another site's name that resolves to this machine
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path == "/":
                self._send("text/html; charset=utf-8", page.html())
            elif self.path == "/version":
                self._send("application/json", json.dumps(page.version()))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            headers = {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the page was closed or reloaded
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing for a request."""

    return Handler
