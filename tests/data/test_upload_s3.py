"""A dataset at s3://, on an S3 server behind a proxy that fails on request."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial

import pytest
from prepared import write_rows

from flatout.cli.main import main
from flatout.data.prepare import pipeline
from flatout.data.prepare.join import join
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.upload import prepare_upload
from flatout.data.store.remote import open_dataset
from flatout.data.store.verify import verify_remote
from flatout.errors import DataError
from flatout.storage.remote.folder import PART_BYTES

URL = "s3://corpus/sets/rows"
OPTIONS = Options(tokenizer="byte", split="hash 0.1")


@pytest.fixture
def text(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", (f"row {number} " * 9 for number in range(300)))


@pytest.fixture
def send(text, tmp_path, monkeypatch):
    """Prepare the text at URL."""
    monkeypatch.setattr(pipeline, "join", partial(join, shard_bytes=12_000))
    return lambda url=URL, options=OPTIONS: prepare_upload(
        [str(text)], url, options, workers=1, cache=tmp_path / "cache"
    )


def test_an_uploaded_dataset_equals_a_local_one(send, bucket, tmp_path, text):
    made = send()
    assert (
        made.manifest.splits
        == prepare_dataset([str(text)], tmp_path / "local", OPTIONS, workers=1).manifest.splits
    )
    fetched = open_dataset(URL, cache=tmp_path / "other")
    assert fetched.manifest == made.manifest
    assert sorted(bucket.find("corpus")) == sorted(
        f"corpus/sets/rows/{path.name}" for path in fetched.path.iterdir()
    )
    assert verify_remote(URL).problems == ()
    assert send().existed


def test_a_file_that_goes_in_parts_is_known_by_the_checksum_of_its_parts(between, bucket, tmp_path):
    """The store's checksum of such a file is one of its parts. If it is right, nothing is read."""
    (tmp_path / "long.jsonl").write_text((json.dumps({"text": "word " * 20_000}) + "\n") * 250)
    made = prepare_upload(
        [str(tmp_path / "long.jsonl")],
        URL,
        Options(tokenizer="byte", split="tail 0.1"),
        workers=1,
        cache=tmp_path / "cache",
    )
    entry = made.manifest.splits["train"].shards[0]
    assert bucket.info(f"{URL}/{entry.name}")["ETag"].endswith(
        f'-{-(-entry.size_bytes // PART_BYTES)}"'
    )
    assert not [line for line in between.asked if line.startswith("GET") and entry.name in line]


def test_a_bucket_that_is_not_there_and_rights_that_are_missing_are_said_first(
    bucket, s3_server, tmp_path
):
    nothing = partial(prepare_upload, ["nothing.txt"], options=OPTIONS, cache=tmp_path)
    with pytest.raises(
        DataError, match=r"There is nothing at s3://nobody/set.*bucket does not exist"
    ):
        nothing(url="s3://nobody/set")
    request = urllib.request.Request(
        f"{s3_server}/moto-api/reset-auth",
        data=b"0",
        method="POST",
        headers={"Content-Type": "text/plain"},
    )
    urllib.request.urlopen(request, timeout=5).close()
    try:
        type(bucket).clear_instance_cache()
        with pytest.raises(DataError, match=r"is not allowed: .*AWS_ACCESS_KEY_ID"):
            nothing(url=URL)
        with pytest.raises(
            DataError,
            match=(
                r"Reading s3://corpus/sets/rows/manifest\.json is not allowed: .*AWS_ACCESS_KEY_ID"
            ),
        ):
            open_dataset(URL, cache=tmp_path)
    finally:
        request.data = b"inf"
        urllib.request.urlopen(request, timeout=5).close()


def test_killed_while_it_sends_it_goes_on(between, text, bucket, tmp_path, monkeypatch, capsys):
    """A second command continues an upload that was killed halfway."""
    monkeypatch.setenv("HOME", str(tmp_path))
    between.failing, between.times = r"PUT .*tokenizer\.json", 10_000
    words = [
        "prepare",
        str(text),
        "--out",
        URL,
        "--tokenizer",
        "byte",
        "--split",
        "hash 0.1",
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while between.times == 10_000:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not bucket.exists(f"{URL}/manifest.json")
    between.failing = ""
    with pytest.raises(SystemExit) as done:
        main([*words, "--json"])
    assert done.value.code in (0, None)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["path"] == URL
    assert verify_remote(URL).problems == ()
