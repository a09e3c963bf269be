"""A proxy in front of an S3 server that fails on request."""

import http.client
import re
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from flatout.storage.remote import connection as connection_module


class Between:
    """Hands requests on to a server. Of those whose method and path match `failing`, `times` are
    answered with `status`; `asked` are all. The status "cut" hands on half of the body, or half of
    the answer; "stall" hands the request on when `released` is set.
    """

    def __init__(self, server):
        self.server = server
        self.failing, self.times, self.status = "", 0, 500
        self.asked = []
        self.released = Event()

    def answer(self, handler):
        line = f"{handler.command} {handler.path}"
        self.asked.append(line)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        fault = None
        if self.times and self.failing and re.search(self.failing, line):
            self.times -= 1
            fault = self.status
        if fault == "stall":
            assert self.released.wait(60), "nothing released the request"
        if fault in (None, "stall", "cut"):
            cuts_body = fault == "cut" and handler.command in ("PUT", "POST")
            status, headers, answer = self._asked(handler, body, cut=cuts_body)
        else:
            status, headers, answer = (
                fault,
                {},
                b"<Error><Code>InternalError</Code><Message>We are sorry.</Message></Error>",
            )
        handler.send_response(status)
        for key, value in headers.items():
            if key.lower() not in (
                "content-length",
                "connection",
                "transfer-encoding",
                "date",
                "server",
            ):
                handler.send_header(key, value)
        handler.send_header("Connection", "close")
        handler.send_header(
            "Content-Length",
            headers.get("Content-Length", "0") if handler.command == "HEAD" else str(len(answer)),
        )
        handler.end_headers()
        sent = len(answer) // 2 if fault == "cut" else len(answer)
        handler.wfile.write(b"" if handler.command == "HEAD" else answer[:sent])

    def _asked(self, handler, body, *, cut):
        left_out = ("connection", "expect", "content-length") if cut else ("connection", "expect")
        headers = {
            key: value for key, value in handler.headers.items() if key.lower() not in left_out
        }
        if cut:
            body = body[: len(body) // 2]
        with closing(
            http.client.HTTPConnection(self.server.removeprefix("http://"), timeout=30)
        ) as connection:
            connection.request(handler.command, handler.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers.items()), answer.read()


@pytest.fixture
def between(s3_server, bucket, monkeypatch):
    """A running Between, which s3fs finds in place of the server; nobody waits long between two
    requests.
    """
    import s3fs

    outer = Between(s3_server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which has an answer to Expect: 100-continue

        def handle_one(self):
            outer.answer(self)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one  # noqa: N815

        def log_message(self, *words):
            pass

    monkeypatch.setattr(connection_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # a client that was killed takes no answer
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        s3fs.S3FileSystem.clear_instance_cache()
        yield outer
        server.shutdown()
        thread.join()
