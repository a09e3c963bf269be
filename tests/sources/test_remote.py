import bz2
import gzip
import importlib
import io
import json
import sys

import pytest

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.errors import DataError, MissingPackage
from flatout.sources import LeftOut, files, remote
from flatout.sources.remote import (
    RemoteFile,
    Unreachable,
    find_remote,
    is_address,
    locate,
    name_of,
    open_remote,
    protocol_of,
)

CONTENT = bytes(range(256)) * 400
_CALL = "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}"
_KEYS = {"key": "a{{i}}{{v()}}", "url": "file:///x{{i}}", "dimensions": {"i": [1]}}
HOSTILE_REFERENCES = {
    "version": 1,
    "templates": {"v": _CALL},
    "gen": [_KEYS],
    "refs": {"manifest.json": "abc"},
}
ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(3000))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(files, "REMOTE_PART_BYTES", 20_000)
    monkeypatch.setattr(files, "PART_BYTES", 20_000)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)


def texts(address, **parameters):
    return [
        row.text
        for part in files.files(address, **parameters)
        for row in part.rows()
        if not isinstance(row, LeftOut)
    ]


def test_what_is_an_address():
    assert [
        is_address(name)
        for name in ("s3://a/b", "hf://x", "git+ssh://x", "a/b.txt", "C:\\x", "mine:source", "://")
    ] == [True] * 3 + [False] * 4
    assert name_of("https://host/a/b.jsonl.gz?download=true") == "/a/b.jsonl.gz"
    assert name_of("s3://bucket/what?.txt") == "s3://bucket/what?.txt"


def test_an_address_may_be_written_in_capitals():
    assert is_address("HTTP://host/a")
    assert protocol_of("HTTP://host/a") == "http"
    assert type(locate("HTTP://host/a")[0]) is type(locate("http://host/a")[0])


def test_a_server_that_does_not_answer_at_once_is_a_named_error():
    with pytest.raises(Unreachable, match=r"Cannot read ftp://127\.0\.0\.1:1/a: .*refused"):
        locate("ftp://u:PASS@127.0.0.1:1/a")


def test_a_file_is_read_from_anywhere(memory):
    memory.pipe("/data/a.bin", CONTENT)
    with open_remote("memory://data/a.bin") as file:
        assert file.read() == CONTENT
        for place in (0, 9_999, 10_000, 10_001, 102_399, 102_400):
            file.seek(place)
            assert file.read(20_005) == CONTENT[place : place + 20_005]
        assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
        assert file.read() == CONTENT[-5:]


def test_a_web_server_is_asked_for_blocks(web):
    web.files["/a.bin"] = CONTENT[:25_000]
    with open_remote(f"{web.address}/a.bin") as file:
        assert file.read() == CONTENT[:25_000]
    assert web.asked == [
        ("/a.bin", "bytes=0-9999"),
        ("/a.bin", "bytes=10000-19999"),
        ("/a.bin", "bytes=20000-24999"),
    ]


@pytest.mark.parametrize("faults", [["500"], [4000], [0, 9999, "503", "429"], ["500", 1]])
def test_what_fails_and_what_comes_short_is_asked_for_again(web, faults):
    web.files["/a.bin"] = CONTENT[:25_000]
    web.faults = list(faults)
    pauses = []
    file = RemoteFile(f"{web.address}/a.bin", sleep=pauses.append)
    assert file.readall() == CONTENT[:25_000]
    assert len(web.asked) == 3 + len(faults)
    assert len(pauses) == len(faults)


def test_the_pauses_double_and_the_end_names_address_byte_and_reason(web, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.5)
    web.files["/a.bin"] = CONTENT[:25_000]
    pauses = []
    file = RemoteFile(f"{web.address}/a.bin", sleep=pauses.append)
    file.seek(10_000)
    web.faults = [7] * 9
    with pytest.raises(
        DataError,
        match=r"Cannot read http://.*/a\.bin at byte 10,000: it gave 7 bytes of 10,000 \(5 attempts\)\. Fix: ",
    ):
        file.read(5)
    assert pauses == [0.5, 1, 2, 4]
    web.faults = ["500"] * 5
    with pytest.raises(
        DataError, match=r"a\.bin at byte 10,000: 500 Internal Server Error \(5 attempts\)"
    ):
        file.read(5)


def test_what_trying_again_cannot_help_is_said_at_once(web):
    pauses = []
    for status, said in (
        (404, "There is nothing at http"),
        (403, "is not allowed"),
        (401, "is not allowed"),
        (400, "is refused"),
    ):
        web.files["/a.txt"] = b"text"
        web.statuses["/a.txt"] = status
        with pytest.raises(DataError, match=said):
            find_remote(f"{web.address}/a.txt", bool, sleep=pauses.append)
    assert pauses == []
    web.statuses["/a.txt"] = 500
    with pytest.raises(DataError, match=r"500.*5 attempts"):
        find_remote(f"{web.address}/a.txt", bool, sleep=pauses.append)
    assert len(pauses) == 4


def test_a_file_of_unknown_length_is_refused(memory, monkeypatch):
    memory.pipe("/data/a.txt", b"text")
    monkeypatch.setattr(memory, "info", lambda path: {"name": path, "type": "file", "size": None})
    with pytest.raises(
        DataError, match=r"does not say how long memory://data/a\.txt is.*Download it"
    ):
        find_remote("memory://data/a.txt", bool)


def test_a_folder_is_not_opened(memory):
    memory.pipe("/data/a.txt", b"text")
    with pytest.raises(DataError, match=r"memory://data is a folder.*Name a file in it"):
        open_remote("memory://data")


def test_what_an_address_cannot_do_is_said_at_once(memory, monkeypatch):
    def refused(path):
        raise NotImplementedError

    monkeypatch.setattr(memory, "info", refused)
    with pytest.raises(
        DataError, match=r"memory://data is not possible: nothing does that for memory"
    ):
        find_remote("memory://data", bool)


def test_a_server_that_is_not_there_is_said(web):
    address = web.address.rpartition(":")[0] + ":9/a.txt"
    with pytest.raises(
        DataError, match=r"Cannot read http://127\.0\.0\.1:9/a\.txt: .*onnect.*5 attempts"
    ):
        files.files(address)


def test_a_server_without_ranges_serves_what_fits_a_block_and_nothing_wrong(web):
    web.ranges = False
    web.files |= {"/small.txt": b"small", "/large.txt": b"x" * 25_000}
    assert texts(f"{web.address}/small.txt") == ["small"]
    with pytest.raises(DataError, match="ignores ranges"):
        texts(f"{web.address}/large.txt")


def test_a_failing_server_is_no_bad_row(web):
    web.files["/a.jsonl.gz"] = gzip.compress(ROWS)
    (part,) = files.files(f"{web.address}/a.jsonl.gz")
    web.faults = ["500"] * 5
    with pytest.raises(DataError, match=r"a\.jsonl\.gz at byte 0"):
        list(part.rows())


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", None)],
)
def test_rows_at_an_address_are_every_row_once(web, ending, pack):
    pack = pack or pytest.importorskip("zstandard").ZstdCompressor().compress
    web.files[f"/a.jsonl{ending}"] = pack(ROWS)
    address = f"{web.address}/a.jsonl{ending}?download=true"
    parts = files.files(address)
    assert len(parts) == (4 if not ending else 1)
    assert [row.text for part in parts for row in part.rows()] == [
        f"row {number}" for number in range(3000)
    ]
    rows = [row for part in parts for row in part.rows()]
    assert rows[1].place.where() == f"{address}, byte 18"


def test_a_bad_row_at_an_address_is_named_by_its_byte(memory):
    memory.pipe("/a.jsonl", b'{"text": "one"}\nbad\n{"text": "two"}\n')
    one, bad, two = (row for part in files.files("memory://a.jsonl") for row in part.rows())
    assert (one.text, two.text) == ("one", "two")
    assert bad.place.where() == "memory://a.jsonl, byte 16"


def test_folders_and_patterns_at_an_address_are_read_in_sorted_order(memory):
    for name in (
        "b.txt",
        "a/z.md",
        "a/b/c.txt.gz",
        ".hidden/x.txt",
        "a/.secret.txt",
        "picture.png",
    ):
        memory.pipe(
            f"/data/{name}", gzip.compress(name.encode()) if name.endswith("gz") else name.encode()
        )
    assert texts("memory://data") == ["a/b/c.txt.gz", "a/z.md", "b.txt"]
    assert texts("memory://data/**/*.txt*") == [
        ".hidden/x.txt",
        "a/.secret.txt",
        "a/b/c.txt.gz",
        "b.txt",
    ]
    assert texts("memory://data/*.png") == ["picture.png"]
    assert texts("memory://data", include=["*.png"])[-1] == "picture.png"
    assert [
        (one.reason, one.name) for one in files.passed_over_in(files.files("memory://data"))
    ] == [(".png file", "memory://data/picture.png")]
    with pytest.raises(DataError, match=r"No file matches memory://data/\*\.c"):
        texts("memory://data/*.c")
    with pytest.raises(DataError, match="There is nothing at memory://nowhere"):
        texts("memory://nowhere")


def test_the_fingerprint_is_what_the_server_says(web):
    web.files["/a.txt"] = b"text"
    web.tags["/a.txt"] = '"one"'
    (before,) = files.files(f"{web.address}/a.txt")
    assert before.fingerprint == f'{web.address}/a.txt 4 ETag="one"'
    assert files.files(f"{web.address}/a.txt")[0].fingerprint == before.fingerprint
    web.tags["/a.txt"] = '"two"'
    assert files.files(f"{web.address}/a.txt")[0].fingerprint != before.fingerprint


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
def test_what_would_follow_instructions_in_a_file_is_not_opened(address, tmp_path):
    """Older fsspec renders the templates of reference:// with whole Jinja, whose expressions reach
    any function.
    """
    (tmp_path / "refs.json").write_text(
        json.dumps(HOSTILE_REFERENCES).replace("MARKER", str(tmp_path / "ran"))
    )
    with pytest.raises(DataError, match="through another filesystem"):
        remote.read_remote(address.format(tmp_path / "refs.json"))
    assert not (tmp_path / "ran").exists()


def test_an_unknown_protocol_is_answered():
    with pytest.raises(DataError, match=r"s4://bucket/a\.txt: Protocol not known: s4\. Fix: .*s3"):
        files.files("s4://bucket/a.txt")


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(
        MissingPackage,
        match=r's3://bucket/a\.txt takes the package s3fs.*pip install "flatout\[s3\]"',
    ):
        files.files("s3://bucket/a.txt")


def test_the_secrets_of_an_address_are_not_stored(web, tmp_path):
    web.files["/rows.jsonl"] = ROWS + b"{broken\n"
    address = f"{web.address.replace('//', '//me:hidden@')}/rows.jsonl?signature=hidden"
    made = prepare_dataset(
        [address], tmp_path / "out", Options(tokenizer="byte", on_bad_row="skip"), workers=1
    )
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    assert made.manifest.source["names"] == [f"{web.address}/rows.jsonl"]
    assert "hidden" not in manifest
    with pytest.raises(DataError) as refused:
        prepare_dataset(
            [address.replace("rows", "none")], tmp_path / "new", Options(tokenizer="byte")
        )
    assert "hidden" not in str(refused.value)
