import bz2
import gzip

import pytest

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.sources import LeftOut, files
from flatout.errors import DataError
from flatout.storage.remote import connection, reading

ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(3000))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(files, "REMOTE_PART_BYTES", 20_000)
    monkeypatch.setattr(files, "PART_BYTES", 20_000)
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)


def texts(address, **parameters):
    return [
        row.text
        for part in files.files(address, **parameters)
        for row in part.rows()
        if not isinstance(row, LeftOut)
    ]


def test_a_server_that_does_not_exist_is_an_error(web):
    address = web.address.rpartition(":")[0] + ":9/a.txt"
    with pytest.raises(
        DataError, match=r"Cannot read http://127\.0\.0\.1:9/a\.txt: .*onnect.*5 attempts"
    ):
        files.files(address)


def test_a_server_without_ranges_serves_only_files_of_one_block(web):
    web.ranges = False
    web.files |= {"/small.txt": b"small", "/large.txt": b"x" * 25_000}
    assert texts(f"{web.address}/small.txt") == ["small"]
    with pytest.raises(DataError, match="ignores ranges"):
        texts(f"{web.address}/large.txt")


def test_a_failing_server_is_not_a_bad_row(web):
    web.files["/a.jsonl.gz"] = gzip.compress(ROWS)
    (part,) = files.files(f"{web.address}/a.jsonl.gz")
    web.faults = ["500"] * 5
    with pytest.raises(DataError, match=r"a\.jsonl\.gz at byte 0"):
        list(part.rows())


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", None)],
)
def test_each_row_of_a_remote_file_is_read_once(web, ending, pack):
    pack = pack or pytest.importorskip("zstandard").ZstdCompressor().compress
    web.files[f"/a.jsonl{ending}"] = pack(ROWS)
    address = f"{web.address}/a.jsonl{ending}?download=true"
    parts = files.files(address)
    assert len(parts) == (4 if not ending else 1)
    assert [row.text for part in parts for row in part.rows()] == [
        f"row {number}" for number in range(3000)
    ]
    rows = [row for part in parts for row in part.rows()]
    assert str(rows[1].location) == f"{address}, byte 18"


def test_a_bad_row_of_a_remote_file_is_located_by_its_byte(memory):
    memory.pipe("/a.jsonl", b'{"text": "one"}\nbad\n{"text": "two"}\n')
    one, bad, two = (row for part in files.files("memory://a.jsonl") for row in part.rows())
    assert (one.text, two.text) == ("one", "two")
    assert str(bad.location) == "memory://a.jsonl, byte 16"


def test_remote_directorys_and_patterns_are_read_in_sorted_order(memory):
    hidden = [".hidden/x.txt", "a/.secret.txt"]
    for name in ["b.txt", "a/z.md", "a/b/c.txt.gz", "picture.png", *hidden]:
        memory.pipe(
            f"/data/{name}", gzip.compress(name.encode()) if name.endswith("gz") else name.encode()
        )
    assert texts("memory://data") == ["a/b/c.txt.gz", "a/z.md", "b.txt"]
    assert texts("memory://data/**/*.txt*") == [*hidden, "a/b/c.txt.gz", "b.txt"]
    assert texts("memory://data/*.png") == ["picture.png"]
    assert texts("memory://data", include=["*.png"])[-1] == "picture.png"
    assert [(one.reason, one.location) for one in files.files("memory://data")[0].skipped] == [
        (".png file", "memory://data/picture.png")
    ]
    with pytest.raises(DataError, match=r"No file matches memory://data/\*\.c"):
        texts("memory://data/*.c")
    with pytest.raises(DataError, match="There is nothing at memory://nowhere"):
        texts("memory://nowhere")


def test_the_fingerprint_of_a_remote_file_is_its_servers_tag(web):
    web.files["/a.txt"] = b"text"
    web.tags["/a.txt"] = '"one"'
    (before,) = files.files(f"{web.address}/a.txt")
    assert before.fingerprint == f'{web.address}/a.txt 4 ETag="one"'
    assert files.files(f"{web.address}/a.txt")[0].fingerprint == before.fingerprint
    web.tags["/a.txt"] = '"two"'
    assert files.files(f"{web.address}/a.txt")[0].fingerprint != before.fingerprint


def test_secrets_in_a_url_are_not_stored(web, tmp_path):
    web.files["/rows.jsonl"] = ROWS + b"{broken\n"
    address = f"{web.address.replace('//', '//me:hidden@')}/rows.jsonl?signature=hidden"
    options = Options(tokenizer="byte", on_bad_row="skip")
    made = prepare_dataset([address], tmp_path / "out", options, workers=1)
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    assert made.manifest.source["names"] == [f"{web.address}/rows.jsonl"]
    assert "hidden" not in manifest
    with pytest.raises(DataError) as refused:
        prepare_dataset([address.replace("rows", "none")], tmp_path / "new", options)
    assert "hidden" not in str(refused.value)
