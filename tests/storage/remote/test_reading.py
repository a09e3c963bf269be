import io
import json

import pytest

from flatout.errors import DataError
from flatout.storage.remote import connection, reading
from flatout.storage.remote.connection import Unreachable, open_filesystem
from flatout.storage.remote.reading import RemoteFile, find_remote, open_remote
from flatout.storage.remote.urls import is_url, name_in, protocol_of

CONTENT = bytes(range(256)) * 400
_CALL = "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}"
_KEYS = {"key": "a{{i}}{{v()}}", "url": "file:///x{{i}}", "dimensions": {"i": [1]}}
HOSTILE_REFERENCES = {
    "version": 1,
    "templates": {"v": _CALL},
    "gen": [_KEYS],
    "refs": {"manifest.json": "abc"},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(reading, "LARGEST_BLOCK_BYTES", 10_000)
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between attempts, which take no time."""
    taken = []
    monkeypatch.setattr(connection, "sleep", taken.append)
    return taken


def test_names_that_are_urls():
    assert [
        is_url(name)
        for name in ("s3://a/b", "hf://x", "git+ssh://x", "a/b.txt", "C:\\x", "mine:source", "://")
    ] == [True] * 3 + [False] * 4
    assert name_in("https://host/a/b.jsonl.gz?download=true") == "/a/b.jsonl.gz"
    assert name_in("s3://bucket/what?.txt") == "s3://bucket/what?.txt"


def test_the_protocol_may_be_written_in_capitals():
    assert is_url("HTTP://host/a")
    assert protocol_of("HTTP://host/a") == "http"
    assert type(open_filesystem("HTTP://host/a")[0]) is type(open_filesystem("http://host/a")[0])


def test_a_server_that_rejects_the_connection_is_unreachable():
    with pytest.raises(Unreachable, match=r"Cannot read ftp://127\.0\.0\.1:1/a: .*refused"):
        open_filesystem("ftp://u:PASS@127.0.0.1:1/a")


def test_a_file_is_read_from_any_offset(memory):
    memory.pipe("/data/a.bin", CONTENT)
    with open_remote("memory://data/a.bin") as file:
        assert file.read() == CONTENT
        for offset in (0, 9_999, 10_000, 10_001, 102_399, 102_400):
            file.seek(offset)
            assert file.read(20_005) == CONTENT[offset : offset + 20_005]
        assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
        assert file.read() == CONTENT[-5:]


def test_a_web_server_is_read_in_blocks(web):
    web.files["/a.bin"] = CONTENT[:25_000]
    with open_remote(f"{web.address}/a.bin") as file:
        assert file.read() == CONTENT[:25_000]
    assert web.asked == [
        ("/a.bin", "bytes=0-9999"),
        ("/a.bin", "bytes=10000-19999"),
        ("/a.bin", "bytes=20000-24999"),
    ]


def test_the_requests_of_a_sequential_reader_grow_until_one_fails(web, pauses, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST_BLOCK_BYTES", 40_000)
    web.files["/a.bin"] = CONTENT[:100_000]
    with open_remote(f"{web.address}/a.bin") as file:
        assert file.read(50_000) == CONTENT[:50_000]
        assert [ranges for _, ranges in web.asked] == [
            "bytes=0-9999",
            "bytes=10000-29999",
            "bytes=30000-69999",
        ]
        web.asked.clear()
        web.faults = [7]
        assert file.read(45_000) == CONTENT[50_000:95_000]
        assert [ranges for _, ranges in web.asked] == [
            "bytes=70000-99999",
            "bytes=70000-79999",
            "bytes=80000-99999",
        ]
        web.asked.clear()
        file.seek(20_000)
        assert file.read(5) == CONTENT[20_000:20_005]
        assert [ranges for _, ranges in web.asked] == ["bytes=20000-29999"]


@pytest.mark.parametrize("faults", [["500"], [4000], [0, 9999, "503", "429"], ["500", 1]])
def test_failed_and_short_responses_are_requested_again(web, pauses, faults):
    web.files["/a.bin"] = CONTENT[:25_000]
    web.faults = list(faults)
    file = RemoteFile(f"{web.address}/a.bin")
    assert file.readall() == CONTENT[:25_000]
    assert len(web.asked) == 3 + len(faults)
    assert len(pauses) == len(faults)


def test_pauses_double_and_the_error_names_url_byte_and_reason(web, pauses, monkeypatch):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.5)
    web.files["/a.bin"] = CONTENT[:25_000]
    file = RemoteFile(f"{web.address}/a.bin")
    file.seek(10_000)
    web.faults = [7] * 9
    with pytest.raises(
        DataError,
        match=r"Cannot read http://.*/a\.bin at byte 10,000: got 7 bytes of 10,000 "
        r"\(5 attempts\)\. Fix: ",
    ):
        file.read(5)
    assert pauses == [0.5, 1, 2, 4]
    web.faults = ["500"] * 5
    with pytest.raises(
        DataError, match=r"a\.bin at byte 10,000: 500 Internal Server Error \(5 attempts\)"
    ):
        file.read(5)


def test_permanent_errors_are_not_retried(web, pauses):
    for status, said in (
        (404, "There is nothing at http"),
        (403, "is not allowed"),
        (401, "is not allowed"),
        (400, "rejects http"),
    ):
        web.files["/a.txt"] = b"text"
        web.statuses["/a.txt"] = status
        with pytest.raises(DataError, match=said):
            find_remote(f"{web.address}/a.txt", bool)
    assert pauses == []
    web.statuses["/a.txt"] = 500
    with pytest.raises(DataError, match=r"500.*5 attempts"):
        find_remote(f"{web.address}/a.txt", bool)
    assert len(pauses) == 4


def test_a_file_of_unknown_length_is_rejected(memory, monkeypatch):
    memory.pipe("/data/a.txt", b"text")
    monkeypatch.setattr(memory, "info", lambda path: {"name": path, "type": "file", "size": None})
    with pytest.raises(
        DataError, match=r"does not report the size of memory://data/a\.txt.*Download it"
    ):
        find_remote("memory://data/a.txt", bool)


def test_a_directory_cannot_be_opened(memory):
    memory.pipe("/data/a.txt", b"text")
    with pytest.raises(DataError, match=r"memory://data is a directory.*Name a file in it"):
        open_remote("memory://data")


def test_an_unsupported_operation_is_not_retried(memory, monkeypatch):
    def refused(path):
        raise NotImplementedError

    monkeypatch.setattr(memory, "info", refused)
    with pytest.raises(
        DataError, match=r"memory://data is not possible: memory does not support it"
    ):
        find_remote("memory://data", bool)


@pytest.mark.parametrize(
    "address",
    [
        "reference://data::file://{}",
        "reference://{}",
        "simplecache::reference://x::file://{}",
        "memory://x::file://{}",
        "dir::reference://{}",
    ],
)
def test_filesystems_that_execute_what_they_read_are_rejected(address, tmp_path):
    """Older fsspec renders the templates of reference:// with full Jinja, which can run code."""
    (tmp_path / "refs.json").write_text(
        json.dumps(HOSTILE_REFERENCES).replace("MARKER", str(tmp_path / "ran"))
    )
    with pytest.raises(DataError, match="through a different filesystem"):
        reading.read_if_there(address.format(tmp_path / "refs.json"))
    assert not (tmp_path / "ran").exists()
