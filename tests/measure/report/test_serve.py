"""The page of a live run, served on this machine alone."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading

import pytest

from flatout.errors import ConfigError
from flatout.measure.report import serve
from flatout.measure.report.reading import RunReader

pytestmark = pytest.mark.slow


@pytest.fixture
def server(make_run):
    """A server of one run, on a free port."""
    folder = make_run()
    page = serve.LivePage([RunReader(folder, "run")])
    with serve.make_server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, server.server_port
        server.shutdown()
        thread.join()


def get(port, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_page_follows_the_run(server):
    folder, port = server
    answer, body = get(port, "/")
    assert answer.status == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert 'data-live="yes"' in body
    assert "connect-src 'self'" in body
    before = json.loads(get(port, "/version")[1])
    assert before["wait_ms"] >= 1000 * serve.MIN_WAIT_S
    assert json.loads(get(port, "/version")[1])["version"] == before["version"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "tokens": 2100, "train/loss": 0.0625}\n')
    assert json.loads(get(port, "/version")[1])["version"] != before["version"]
    assert "0.0625" in get(port, "/")[1]


def test_the_page_is_rendered_once_for_each_state(make_run, monkeypatch):
    page = serve.LivePage([RunReader(make_run(), "run")])
    calls = []
    monkeypatch.setattr(serve, "render", lambda *a, **k: calls.append(1) or "page")
    assert [page.html(), page.html()] == ["page", "page"]
    assert len(calls) == 1


def test_only_this_machine_is_answered(server):
    _, port = server
    assert get(port, "/", host="example.org")[0].status == 403
    assert get(port, "/", host=f"example.org:{port}")[0].status == 403
    assert get(port, "/", host=f"localhost:{port}")[0].status == 200


def test_a_page_that_is_closed_before_it_arrives_is_no_error(make_run, monkeypatch, capsys):
    page, closed = serve.LivePage([RunReader(make_run(), "run")]), threading.Event()
    before = set(threading.enumerate())
    monkeypatch.setattr(page, "html", lambda: "x" * closed.wait(60) * 50_000_000)
    with serve.make_server(page, 0) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
            thread.join()
        closed.set()
        for worker in set(threading.enumerate()) - before:
            worker.join(60)
    assert not capsys.readouterr().err


def test_no_file_is_served(server):
    _, port = server
    for path in ("/metrics.jsonl", "/../config.yaml", "//etc/passwd"):
        assert get(port, path)[0].status == 404


def test_a_taken_port_is_said(server, make_run):
    page = serve.LivePage([])
    with pytest.raises(ConfigError) as caught:
        serve.make_server(page, server[1])
    assert "--port 0" in caught.value.fix


def test_ctrl_c_ends_it(make_run, monkeypatch):
    def interrupted(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.ThreadingHTTPServer, "serve_forever", interrupted)
    page = serve.LivePage([RunReader(make_run(), "run")])
    assert serve.serve(page, 0).startswith("http://127.0.0.1:")
