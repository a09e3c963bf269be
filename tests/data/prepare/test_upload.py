"""A data set prepared to an address: sent whole or without a manifest, gone on with, refused early,
the same bytes as in a folder.
"""

import base64
import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest

from flatout.data.prepare import upload
from flatout.data.prepare.merge import join
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.upload import CLAIM, prepare_upload
from flatout.data.store.remote import home_of, open_place
from flatout.errors import DataError, MissingPackage
from flatout.sources.remote import Unreachable

ADDRESS = "faulty://bucket/set"
OPTIONS = Options(tokenizer="byte", split="hash 0.1")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"row {number} " * 9}) + "\n" for number in range(300))
    )
    return path


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("flatout.data.prepare.pipeline.join", partial(join, shard_bytes=12_000))


@pytest.fixture
def send(text, tmp_path, store, small_shards):
    """Prepare the text to ADDRESS."""

    def prepare(options=OPTIONS, address=ADDRESS, sources=None, **parameters):
        return prepare_upload(
            sources or [str(text)],
            address,
            options,
            workers=1,
            cache=tmp_path / "cache",
            **parameters,
        )

    return prepare


def stored(store):
    return {
        path.removeprefix("/bucket/set/"): file.getvalue() for path, file in store.store.items()
    }


def folders(tmp_path):
    return sorted(
        path.name for path in home_of(ADDRESS, tmp_path / "cache").iterdir() if path.is_dir()
    )


def md5_of_parts(content, size):
    parts = [
        hashlib.md5(content[start : start + size]).digest()
        for start in range(0, len(content), size)
    ]
    return {"ETag": f'"{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}"'}


def puts(store):
    return [Path(name.removeprefix("put ")).name for name in store.asked if name.startswith("put ")]


def test_it_is_what_a_folder_would_hold_and_the_manifest_comes_last(
    send, text, store, tmp_path, said
):
    made = send(progress=said)
    local = prepare_dataset([str(text)], tmp_path / "local", OPTIONS, workers=1)
    assert stored(store) == {path.name: path.read_bytes() for path in local.path.iterdir()}
    assert (made.path, made.existed, made.manifest) == (ADDRESS, False, local.manifest)
    assert puts(store)[:2] == [upload.PROBE, CLAIM]
    assert puts(store)[-1] == "manifest.json"
    assert said.lines == [
        f"The data set is prepared in {home_of(ADDRESS, tmp_path / 'cache') / 'work'}, then sent to {ADDRESS}."
    ]


def test_what_was_sent_is_this_machines_copy(send, store, tmp_path):
    made = send()
    assert len(folders(tmp_path)) == 1
    store.asked.clear()
    dataset = open_place(ADDRESS, cache=tmp_path / "cache")
    assert dataset.manifest == made.manifest
    assert store.asked == ["get /bucket/set/manifest.json"]


def test_asked_again_it_is_left_and_another_data_set_is_refused(send, store, tmp_path, said):
    made = send()
    store.asked.clear()
    again = send(progress=said)
    assert (again.existed, again.manifest) == (True, made.manifest)
    assert store.asked == ["get /bucket/set/manifest.json"]
    assert said.lines == [
        f"{ADDRESS} already holds this data set: {made.manifest.tokens:,} tokens. Nothing to do."
    ]
    with pytest.raises(
        DataError,
        match=r"faulty://bucket/set holds another data set: max_documents None there, 5 asked for",
    ):
        send(Options(tokenizer="byte", split="hash 0.1", max_documents=5))
    assert puts(store) == []


def test_validation_text_goes_along_and_other_is_refused(send, store, tmp_path):
    for name in ("valid", "other"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text")
    options = Options(tokenizer="byte", val=(str(tmp_path / "valid.txt"),))
    assert send(options).manifest.splits["val"].documents == 1
    assert send(options).existed
    with pytest.raises(
        DataError, match=r"the validation text .*valid.txt there, .*other.txt asked for"
    ):
        send(Options(tokenizer="byte", val=(str(tmp_path / "other.txt"),)))


def test_a_place_with_other_files_is_refused_before_the_text_is_read(send, store):
    store.pipe_file(f"{ADDRESS}/picture.png", b"png")
    for address in (ADDRESS, f"{ADDRESS}/picture.png"):
        with pytest.raises(DataError, match=f"{address} is not empty and is not a data set"):
            send(address=address, sources=["nothing.txt"])
    assert puts(store) == []


def test_a_place_that_cannot_be_written_is_refused_before_the_text_is_read(send, store):
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
        DataError, match="Writing faulty://bucket/set is not possible: nothing does that for faulty"
    ):
        send(sources=["nothing.txt"])
    for address in ("https://host/set", "hf://datasets/org/name/set"):
        with pytest.raises(DataError, match="are only read"):
            send(address=address, sources=["nothing.txt"])
    with pytest.raises(DataError, match="no user, no password"):
        send(address="s3://key:hidden@bucket/set", sources=["nothing.txt"])
    with pytest.raises(DataError, match="Protocol not known: s4"):
        send(address="s4://bucket/set", sources=["nothing.txt"])


def test_a_missing_package_is_named_with_its_extra(send, monkeypatch):
    import fsspec

    def missing(address):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        MissingPackage,
        match=r'Writing s3://bucket/set takes the package s3fs.*pip install "flatout\[s3\]"',
    ):
        send(address="s3://bucket/set", sources=["nothing.txt"])


def test_text_that_cannot_be_used_leaves_the_place_empty(send, store, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="holds no document"):
        send(sources=[str(tmp_path / "empty.txt")])
    assert stored(store) == {}
    assert send().manifest.documents == 300


@pytest.mark.parametrize("tags", ["none", "whole", "parts", "gcs", "encrypted"])
def test_a_send_that_broke_off_goes_on_and_sends_nothing_twice(
    send, store, monkeypatch, tags, tmp_path, said
):
    """With a store that says nothing of its files but their sizes, their MD5, that of their parts,
    Google's, or a number of another kind.
    """
    monkeypatch.setattr("flatout.data.store.transfers.AT_ONCE", 1)
    monkeypatch.setattr(upload, "PART_BYTES", 6_000)
    tellers = {
        "none": lambda content: {},
        "whole": lambda content: {"ETag": f'"{hashlib.md5(content).hexdigest()}"'},
        "parts": partial(md5_of_parts, size=6_000),
        "gcs": lambda content: {
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "etag": "CAE=",
        },
        "encrypted": lambda content: {"ETag": hashlib.md5(content + b"key").hexdigest()},
    }
    monkeypatch.setattr(type(store), "tags", tellers[tags])
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
        path.name for path in open_place(ADDRESS, cache=tmp_path / "cache").path.iterdir()
    )
    assert any("was prepared before" in line for line in said.lines)
    assert made.manifest.documents == 300


def test_half_a_data_set_is_gone_on_with_by_the_same_alone(send, store):
    store.faults[:] = [None, None, *[OSError("500")] * 99]
    with pytest.raises(Unreachable):
        send()
    store.faults.clear()
    with pytest.raises(
        DataError,
        match="faulty://bucket/set holds half of another data set: max_documents None there, 5 asked for",
    ):
        send(Options(tokenizer="byte", split="hash 0.1", max_documents=5))
    store.rm_file(f"{ADDRESS}/{CLAIM}")
    with pytest.raises(
        DataError,
        match=r"work/set waits to be sent and holds another data set: max_documents None there",
    ):
        send(Options(tokenizer="byte", split="hash 0.1", max_documents=5))
    assert not send().existed


def test_what_arrives_changed_is_not_called_whole(send, store, monkeypatch):
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
        DataError, match=r"faulty://bucket/set/train-00001\.bin is not what was sent"
    ):
        send()
    assert "manifest.json" not in stored(store)
    monkeypatch.setattr(type(store), "put_file", put_file)
    assert not send().existed


def test_a_manifest_that_arrives_changed_does_not_stay(send, store, monkeypatch):
    put_file = type(store).put_file

    def damaging(self, lpath, rpath, **kwargs):
        put_file(self, lpath, rpath, **kwargs)
        if rpath.endswith("manifest.json"):
            self.pipe_file(rpath, b"{")

    monkeypatch.setattr(type(store), "put_file", damaging)
    with pytest.raises(DataError, match=r"faulty://bucket/set/manifest\.json is not what was sent"):
        send()
    assert "manifest.json" not in stored(store)


def test_what_fails_once_is_sent_again_and_counted_once(send, store):
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
    tokenizer = len(stored(store)["tokenizer.json"])
    assert sum(counted) * 1e6 == pytest.approx(
        sum(entry.size_bytes for entry in made.manifest.files) + tokenizer
    )


def test_a_process_at_work_is_named(send, tmp_path):
    import fcntl

    home = home_of(ADDRESS, tmp_path / "cache")
    home.mkdir(parents=True)
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(
        DataError,
        match=re.escape(f"Another process on this machine is preparing or fetching {ADDRESS}."),
    ):
        send()
    os.close(lock)
    assert not send().existed


def test_a_claim_of_another_flatout_is_refused(send, store):
    store.pipe_file(f"{ADDRESS}/{CLAIM}", b'{"format_version": 2}')
    with pytest.raises(DataError, match=r"set/upload\.json is not of this flatout"):
        send()
