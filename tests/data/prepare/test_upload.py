"""Preparing at a URL: the bytes of a local dataset, the manifest last, resuming, early errors."""

import base64
import hashlib
import os
import re
from functools import partial
from pathlib import Path

import pytest
from prepared import write_rows

from flatout.data.prepare import pipeline
from flatout.data.prepare.join import join
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.upload import PROBE, prepare_upload
from flatout.data.store.remote import cache_dir_of, open_dataset
from flatout.errors import DataError, MissingPackage, OutputInUse
from flatout.storage.remote import folder, parallel
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.folder import CLAIM

URL = "faulty://bucket/set"
OPTIONS = Options(tokenizer="byte", split="hash 0.1")


@pytest.fixture
def text(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", (f"row {number} " * 9 for number in range(300)))


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(pipeline, "join", partial(join, shard_bytes=12_000))


@pytest.fixture
def send(text, tmp_path, store, small_shards):
    """Prepare the text at URL."""

    def prepare(options=OPTIONS, url=URL, sources=None, **parameters):
        return prepare_upload(
            sources or [str(text)], url, options, workers=1, cache=tmp_path / "cache", **parameters
        )

    return prepare


def stored(store):
    return {
        path.removeprefix("/bucket/set/"): file.getvalue() for path, file in store.store.items()
    }


def folders(tmp_path):
    return sorted(
        path.name for path in cache_dir_of(URL, tmp_path / "cache").iterdir() if path.is_dir()
    )


def md5_of_parts(content, size):
    parts = [
        hashlib.md5(content[start : start + size]).digest()
        for start in range(0, len(content), size)
    ]
    return {"ETag": f'"{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}"'}


def puts(store):
    return [Path(name.removeprefix("put ")).name for name in store.asked if name.startswith("put ")]


def test_the_files_are_those_of_a_directory_and_the_manifest_comes_last(
    send, text, store, tmp_path, said
):
    made = send(progress=said)
    local = prepare_dataset([str(text)], tmp_path / "local", OPTIONS, workers=1)
    assert stored(store) == {path.name: path.read_bytes() for path in local.path.iterdir()}
    assert (made.path, made.existed, made.manifest) == (URL, False, local.manifest)
    assert puts(store)[:2] == [PROBE, CLAIM]
    assert puts(store)[-1] == "manifest.json"
    assert said.lines == [
        f"Preparing the dataset in {cache_dir_of(URL, tmp_path / 'cache') / 'work'}, "
        f"then sending it to {URL}."
    ]


def test_the_uploaded_dataset_becomes_this_machines_copy(send, store, tmp_path):
    made = send()
    assert len(folders(tmp_path)) == 1
    store.asked.clear()
    dataset = open_dataset(URL, cache=tmp_path / "cache")
    assert dataset.manifest == made.manifest
    assert store.asked == ["get /bucket/set/manifest.json"]


def test_the_same_dataset_is_left_unchanged_and_a_different_one_is_rejected(
    send, store, tmp_path, said
):
    made = send()
    store.asked.clear()
    again = send(progress=said)
    assert (again.existed, again.manifest) == (True, made.manifest)
    assert store.asked == ["get /bucket/set/manifest.json"]
    assert said.lines == [
        f"{URL} already contains this dataset: {made.manifest.tokens:,} tokens. Nothing to do."
    ]
    with pytest.raises(
        OutputInUse,
        match="faulty://bucket/set contains a different dataset: "
        "max_documents is None, and 5 is requested",
    ):
        send(Options(tokenizer="byte", split="hash 0.1", max_documents=5))
    assert puts(store) == []


def test_a_url_with_other_files_is_rejected_before_the_text_is_read(send, store):
    store.pipe_file(f"{URL}/picture.png", b"png")
    for url in (URL, f"{URL}/picture.png"):
        with pytest.raises(OutputInUse, match=f"{url} is not empty and is not a dataset"):
            send(url=url, sources=["nothing.txt"])
    assert puts(store) == []


def test_a_url_that_cannot_be_written_is_rejected_before_the_text_is_read(send, store):
    store.faults[:] = [PermissionError("Access Denied")]
    with pytest.raises(
        DataError, match="Writing faulty://bucket/set is not allowed: Access Denied"
    ):
        send(sources=["nothing.txt"])
    store.faults[:] = [FileNotFoundError("The specified bucket does not exist")]
    with pytest.raises(
        DataError,
        match=r"There is nothing at faulty://bucket/set \(The specified bucket does not exist\)",
    ):
        send(sources=["nothing.txt"])
    store.faults[:] = [NotImplementedError()]
    with pytest.raises(
        DataError, match="Writing faulty://bucket/set is not possible: faulty does not support it"
    ):
        send(sources=["nothing.txt"])
    for url in ("https://host/set", "hf://datasets/org/name/set"):
        with pytest.raises(DataError, match="are read-only"):
            send(url=url, sources=["nothing.txt"])
    with pytest.raises(DataError, match="must not contain a user, a password"):
        send(url="s3://key:hidden@bucket/set", sources=["nothing.txt"])
    with pytest.raises(DataError, match="Protocol not known: s4"):
        send(url="s4://bucket/set", sources=["nothing.txt"])


@pytest.mark.parametrize(
    ("lacking", "state"),
    [("s3fs", "which is not installed"), ("aiobotocore", r"which cannot be imported \(No module")],
)
def test_a_missing_package_is_named_with_its_extra(send, monkeypatch, lacking, state):
    import fsspec

    def missing(url):
        cause = ModuleNotFoundError(f"No module named {lacking!r}", name=lacking)
        raise ImportError("Install s3fs to access S3") from cause

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        MissingPackage,
        match=rf'Writing s3://bucket/set needs the package s3fs, {state}.*pip install "flatout\[s3',
    ):
        send(url="s3://bucket/set", sources=["nothing.txt"])


def test_unusable_text_leaves_the_url_empty(send, store, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="contains no documents"):
        send(sources=[str(tmp_path / "empty.txt")])
    assert stored(store) == {}
    assert send().manifest.documents == 300


@pytest.mark.parametrize("tags", ["none", "whole", "parts", "gcs", "encrypted"])
def test_an_interrupted_upload_resumes_and_sends_nothing_twice(
    send, store, monkeypatch, tags, tmp_path, said
):
    """Stores report only sizes, an MD5, S3's MD5 of parts, Google's MD5, or a different number."""
    """Stores report only sizes, an MD5, S3's MD5 of parts, Google's MD5, or a different number."""
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 1)
    monkeypatch.setattr(folder, "PART_BYTES", 6_000)
    reports = {
        "none": lambda content: {},
        "whole": lambda content: {"ETag": f'"{hashlib.md5(content).hexdigest()}"'},
        "parts": partial(md5_of_parts, size=6_000),
        "gcs": lambda content: {
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "etag": "CAE=",
        },
        "encrypted": lambda content: {"ETag": hashlib.md5(content + b"key").hexdigest()},
    }
    monkeypatch.setattr(type(store), "tags", reports[tags])
    first = [f"train-0000{number}.bin" for number in range(2)]
    gets = [None] * 2 if tags == "encrypted" else []
    store.faults[:] = [None, None, *[None] * 2, *gets, *[OSError("500")] * 5]
    with pytest.raises(
        Unreachable, match=r"Cannot write faulty://bucket/set/train-00002\.bin: 500 \(5 attempts\)"
    ):
        send()
    assert sorted(stored(store)) == [*first, CLAIM]
    store.asked.clear()
    made = send(progress=said)
    assert not set(puts(store)) & {*first, CLAIM}
    assert bool([name for name in store.asked if name == "get /bucket/set/train-00000.bin"]) == (
        tags == "encrypted"
    )
    assert sorted(stored(store)) == sorted(
        path.name for path in open_dataset(URL, cache=tmp_path / "cache").path.iterdir()
    )
    assert any("was already prepared" in line for line in said.lines)
    assert made.manifest.documents == 300


def test_an_unfinished_upload_is_resumed_only_by_the_same_dataset(send, store):
    store.faults[:] = [None, None, *[OSError("500")] * 99]
    with pytest.raises(Unreachable):
        send()
    store.faults.clear()
    with pytest.raises(
        OutputInUse,
        match="faulty://bucket/set contains an unfinished, different dataset: "
        "max_documents is None, and 5 is requested",
    ):
        send(Options(tokenizer="byte", split="hash 0.1", max_documents=5))
    store.rm_file(f"{URL}/{CLAIM}")
    with pytest.raises(
        OutputInUse,
        match="work/set, which waits to be sent, contains a different dataset: "
        "max_documents is None",
    ):
        send(Options(tokenizer="byte", split="hash 0.1", max_documents=5))
    assert not send().existed


def test_a_file_that_arrives_altered_is_an_error(send, store, monkeypatch):
    monkeypatch.setattr(
        type(store), "tags", lambda content: {"ETag": hashlib.md5(content + b"key").hexdigest()}
    )
    put_file = type(store).put_file

    def damaging(self, lpath, rpath, **kwargs):
        put_file(self, lpath, rpath, **kwargs)
        if rpath.endswith("train-00001.bin"):
            content = self.store[rpath].getvalue()
            self.pipe_file(rpath, content[:-1] + bytes([content[-1] ^ 1]))

    monkeypatch.setattr(type(store), "put_file", damaging)
    with pytest.raises(
        DataError, match=r"faulty://bucket/set/train-00001\.bin differs from the file that was sent"
    ):
        send()
    assert "manifest.json" not in stored(store)
    monkeypatch.setattr(type(store), "put_file", put_file)
    assert not send().existed


def test_failed_sends_are_retried_and_counted_once(send, store):
    counted = []

    class Counting:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def advance(self, amount=1.0):
            counted.append(amount)

        def note(self, text):
            pass

    class Progress:
        def task(self, what, **_):
            counted.clear()
            return Counting()

        def say(self, line):
            pass

    store.faults[:] = [None, None, ConnectionError("gone"), None, TimeoutError("slow")]
    made = send(progress=Progress())
    assert sum(counted) * 1e6 == pytest.approx(sum(e.size_bytes for e in made.manifest.files))


def test_a_second_process_is_rejected(send, tmp_path):
    import fcntl

    home = cache_dir_of(URL, tmp_path / "cache")
    home.mkdir(parents=True)
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(
        DataError,
        match=re.escape(f"Another process on this machine is preparing or fetching {URL}."),
    ):
        send()
    os.close(lock)
    assert not send().existed


def test_a_claim_of_another_version_is_rejected(send, store):
    store.pipe_file(f"{URL}/{CLAIM}", b'{"format_version": 2}')
    with pytest.raises(
        OutputInUse, match=r"set/upload\.json was not written by this version of flatout"
    ):
        send()
