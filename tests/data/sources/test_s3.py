"""Text at s3://, read from a local S3 server that s3fs finds through its usual variables."""

import gzip
import urllib.request

import pytest

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.sources import Document, files
from flatout.errors import DataError
from flatout.storage.remote import reading

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(3000))
TEXTS = [f"row {number}" for number in range(3000)]


def texts(address):
    rows = [row for part in files.files(address) for row in part.rows()]
    return [row.text for row in rows if isinstance(row, Document)]


def test_objects_prefixes_and_patterns_are_read(bucket, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(files, "REMOTE_PART_BYTES", 20_000)
    monkeypatch.setattr(files, "PART_BYTES", 20_000)
    bucket.pipe(
        {
            "corpus/a/rows.jsonl": ROWS,
            "corpus/a/b/rows.jsonl.gz": gzip.compress(ROWS),
            "corpus/a/picture.png": b"no",
        }
    )
    assert len(files.files("s3://corpus/a/rows.jsonl")) == 4
    assert texts("s3://corpus/a/rows.jsonl") == TEXTS
    assert texts("s3://corpus/a") == TEXTS + TEXTS
    skipped = files.files("s3://corpus/a")[0].skipped
    assert [(row.location, row.count) for row in skipped] == [("s3://corpus/a/picture.png", 1)]
    assert texts("s3://corpus/**/*.gz") == TEXTS


def test_the_same_dataset_results_and_a_change_is_noticed(bucket, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    bucket.pipe("corpus/rows.jsonl", ROWS)
    options = Options(tokenizer="byte")
    made = [
        prepare_dataset([name], tmp_path / out, options, workers=2)
        for name, out in ((str(tmp_path / "rows.jsonl"), "a"), ("s3://corpus/rows.jsonl", "b"))
    ]
    assert made[0].manifest.splits == made[1].manifest.splits
    assert prepare_dataset(["s3://corpus/rows.jsonl"], tmp_path / "b", options).existed
    bucket.pipe("corpus/rows.jsonl", ROWS.replace(b"row 7", b"row 8"))
    with pytest.raises(DataError, match="the text has changed"):
        prepare_dataset(["s3://corpus/rows.jsonl"], tmp_path / "b", options)


def test_missing_objects_are_an_error(bucket):
    for address in ("s3://corpus/none.txt", "s3://nobody/a.txt"):
        with pytest.raises(DataError, match=f"There is nothing at {address}"):
            files.files(address)
    with pytest.raises(DataError, match=r"No file matches s3://corpus/\*\.txt"):
        files.files("s3://corpus/*.txt")


def test_forbidden_objects_are_an_error(bucket, s3_server, monkeypatch):
    """The server requires authentication from the next request on."""
    bucket.pipe("corpus/a.txt", b"text")
    request = urllib.request.Request(
        f"{s3_server}/moto-api/reset-auth",
        data=b"0",
        method="POST",
        headers={"Content-Type": "text/plain"},
    )
    urllib.request.urlopen(request, timeout=5).close()
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(
            DataError, match=r"Reading s3://corpus/a\.txt is not allowed: .*AWS_ACCESS_KEY_ID"
        ):
            files.files("s3://corpus/a.txt")
    finally:
        request.data = b"inf"
        urllib.request.urlopen(request, timeout=5).close()
