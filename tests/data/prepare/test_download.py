import hashlib
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from flatout.data.prepare.download import check_file, download
from flatout.errors import DataError

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """A file server on loopback: `ranges` it honours or not, connections it breaks after
    `break_after` bytes, `statuses` it answers first.
    """

    def __init__(self, *, content=CONTENT, ranges=True, breaks=(), statuses=()):
        self.content = content
        self.ranges = ranges
        self.breaks = list(breaks)
        self.statuses = list(statuses)
        self.asked: list[str | None] = []

    @contextmanager
    def running(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *words):
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/input.txt"
            finally:
                server.shutdown()
                thread.join()

    def answer(self, handler):
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.ranges else 0
        if start and start >= len(self.content):
            handler.send_error(416)
            return
        body = self.content[start:]
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header(
                "Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
            )
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.breaks.pop(0)] if self.breaks else body)


def fetch(server, target, sha256=SHA256):
    with server.running() as address:
        return download(
            address, target, sha256=sha256, num_bytes=len(CONTENT), pause_s=0.001, timeout_s=5
        )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_fetched_once_and_whole(tmp_path):
    server = Server()
    target = tmp_path / "cache" / "input.txt"
    assert fetch(server, target) == target
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["input.txt"]
    fetch(server, target)
    assert server.asked == [None], "the second call found it"


def test_a_file_that_was_changed_is_fetched_again(tmp_path):
    server = Server()
    (tmp_path / "input.txt").write_bytes(b"changed")
    fetch(server, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_a_broken_connection_goes_on_where_it_broke(tmp_path):
    server = Server(breaks=[len(CONTENT) // 2, 1000])
    fetch(server, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT
    half = len(CONTENT) // 2
    assert server.asked == [None, f"bytes={half}-", f"bytes={half + 1000}-"]


def test_a_server_that_ignores_ranges_starts_over(tmp_path):
    server = Server(ranges=False, breaks=[5000])
    fetch(server, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=5000-"]


def test_the_next_call_goes_on_too(tmp_path):
    server = Server(breaks=[1000] * 5)
    with pytest.raises(DataError, match=r"broke off.*first 5,000 bytes are kept.*--from"):
        fetch(server, tmp_path / "input.txt")
    assert names(tmp_path) == ["input.txt.part"]
    fetch(server, tmp_path / "input.txt")
    assert server.asked[-1] == "bytes=5000-"
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_a_beginning_of_another_file_is_thrown_away_and_all_is_fetched(tmp_path):
    server = Server()
    (tmp_path / "input.txt.part").write_bytes(b"other" * 100)
    fetch(server, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT
    assert server.asked == ["bytes=500-", None]


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more"])
def test_a_beginning_as_long_as_the_file_or_longer_starts_over(tmp_path, left):
    (tmp_path / "input.txt.part").write_bytes(left)
    fetch(Server(), tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_another_file_than_the_checksum_says_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match=f"{hashlib.sha256(b'evil').hexdigest()}, not {SHA256}"):
        fetch(Server(content=b"evil"), tmp_path / "input.txt")
    assert names(tmp_path) == []


def test_an_address_that_is_gone_is_said_at_once(tmp_path):
    server = Server(statuses=[404] * 5)
    with pytest.raises(DataError, match=r"answers 404.*--from"):
        fetch(server, tmp_path / "input.txt")
    assert len(server.asked) == 1


def test_a_server_that_is_busy_is_asked_again(tmp_path):
    server = Server(statuses=[503, 429])
    fetch(server, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_an_address_that_does_not_answer_is_said(tmp_path):
    with Server().running() as address:
        pass
    with pytest.raises(DataError, match="cannot be reached"):
        download(address, tmp_path / "input.txt", sha256=SHA256, pause_s=0.001, timeout_s=1)


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="Cannot write"):
        fetch(Server(), tmp_path / "file" / "input.txt")


def test_a_file_of_ones_own_is_checked(tmp_path):
    (tmp_path / "a.txt").write_bytes(CONTENT)
    check_file(tmp_path / "a.txt", SHA256)
    (tmp_path / "a.txt").write_bytes(b"other")
    with pytest.raises(DataError, match=f"not {SHA256}"):
        check_file(tmp_path / "a.txt", SHA256)
    with pytest.raises(DataError, match="Cannot read"):
        check_file(tmp_path / "b.txt", SHA256)
