"""A dataset at a URL reads like the original folder. It is fetched once, checked and resumable."""

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flatout.config.sections import DataConfig
from flatout.data.store.mix import members_of, open_data
from flatout.data.store.remote import (
    absolute_path_or_url,
    cache_dir_of,
    copy_dir_of,
    dataset_url,
    fetch_dataset,
    open_dataset,
)
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, DataError
from flatout.storage.remote import parallel
from flatout.storage.remote.connection import Unreachable

URL = "faulty://bucket/set"


@pytest.fixture
def upload(store):
    """Put a folder at a URL."""

    def put(folder, url=URL):
        for path in folder.iterdir():
            store.put_file(str(path), f"{url}/{path.name}")
        store.asked.clear()

    return put


@pytest.fixture
def uploaded(write_set, upload):
    """The folder of a dataset with several shards, which is also uploaded to URL."""
    folder = write_set(np.arange(300), [7, 8, 9], shard_bytes=200)
    upload(folder)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_remote_dataset_is_fetched_once_and_reads_like_its_directory(
    uploaded, store, tmp_path, said
):
    dataset = open_dataset(URL + "/", cache=tmp_path / "cache")
    assert contents(dataset.path) == contents(uploaded)
    assert dataset.origin == URL
    assert dataset.split("train").read_tokens(0, 300).tolist() == list(range(300))
    assert dataset.path.parent == cache_dir_of(URL, tmp_path / "cache")
    assert sorted(store.asked) == [f"get /bucket/set/{name}" for name in sorted(contents(uploaded))]
    store.asked.clear()
    again = open_dataset(URL, cache=tmp_path / "cache", progress=said)
    assert again.path == dataset.path
    assert store.asked == ["get /bucket/set/manifest.json"]
    assert said.lines == []


def test_a_config_and_the_environment_choose_the_directory_of_copies(
    uploaded, store, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "all"))
    everywhere = cache_dir_of(URL, tmp_path / "all")
    assert open_dataset(URL).path.parent == everywhere
    assert open_data(DataConfig(path=URL)).path.parent == everywhere
    own = str(tmp_path / "own")
    assert open_data(DataConfig(path=URL, cache=own)).path.parent == cache_dir_of(URL, Path(own))
    store.asked.clear()
    (member,) = members_of(open_data(DataConfig(mix={URL: 1}, cache=own)))
    assert member.dataset.path.parent == cache_dir_of(URL, Path(own))
    assert store.asked == ["get /bucket/set/manifest.json"]


def test_a_local_directory_is_opened_in_place(uploaded, store):
    assert open_dataset(uploaded).path == uploaded
    assert open_dataset(str(uploaded)).origin == str(uploaded)
    assert store.asked == []


def test_a_configuration_may_name_urls(uploaded, upload, write_set, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    upload(write_set([1, 2, 3], name="other"), "faulty://bucket/other")
    alone = open_data(DataConfig(path=URL))
    assert [(part.name, part.dataset.origin) for part in members_of(alone)] == [("set", URL)]
    mixed = open_data(DataConfig(mix={URL: 1, "faulty://bucket/other": 1, str(uploaded): 2}))
    assert [part.name for part in mixed.members] == [
        "bucket/set",
        "bucket/other",
        f"{tmp_path.name}/set",
    ]
    with pytest.raises(ConfigError, match=f"names {URL} twice"):
        open_data(DataConfig(mix={f"{URL}/": 1, URL: 1}))


def test_a_changed_dataset_is_fetched_again_and_the_old_copy_stays(
    uploaded, upload, write_set, tmp_path, said
):
    old = fetch_dataset(URL, cache=tmp_path / "cache")
    upload(write_set([5, 6, 7], name="new"))
    new = fetch_dataset(URL, cache=tmp_path / "cache", progress=said)
    assert Dataset.open(new).split("train").read_tokens(0, 3).tolist() == [5, 6, 7]
    assert contents(old) == contents(uploaded)
    assert said.lines == [
        f"{URL} has changed. The earlier version stays in {old}. Remove it when no run uses it."
    ]


def test_the_last_copy_is_read_when_the_store_does_not_answer(
    uploaded, store, upload, write_set, tmp_path, said
):
    store.faults[:] = [OSError("no route")] * 5
    with pytest.raises(Unreachable, match=r"set/manifest\.json: no route \(5 attempts\)"):
        fetch_dataset(URL, cache=tmp_path / "cache")
    first = fetch_dataset(URL, cache=tmp_path / "cache")
    os.utime(first, (0, 0))
    upload(write_set([5, 6, 7], name="new"))
    second = fetch_dataset(URL, cache=tmp_path / "cache")
    store.faults[:] = [OSError("no route")]
    assert fetch_dataset(URL, cache=tmp_path / "cache", progress=said) == second
    assert said.lines == [
        f"Cannot read {URL}/manifest.json: no route (1 attempt). Reading the copy in {second}."
    ]
    (second / "train-00000.bin").unlink()
    (second.parent / "broken").mkdir()
    (second.parent / "broken" / "manifest.json").write_text("{")
    store.faults[:] = [OSError("no route")]
    assert fetch_dataset(URL, cache=tmp_path / "cache") == first


def test_an_interrupted_fetch_resumes_by_file(uploaded, store, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 1)
    store.faults[:] = [None, None, None, *[OSError("it broke")] * 5]
    with pytest.raises(
        Unreachable,
        match=r"Cannot read faulty://bucket/set/train-00002\.bin at byte 0: "
        r"it broke \(5 attempts\)",
    ):
        fetch_dataset(URL, cache=tmp_path / "cache")
    (copy,) = (path for path in cache_dir_of(URL, tmp_path / "cache").iterdir() if path.is_dir())
    there = {path.name for path in copy.iterdir()}
    assert {"train-00000.bin", "train-00001.bin"} <= there, (
        "files queued behind the one that failed may have arrived too"
    )
    assert "train-00002.bin" not in there
    (copy / "train-00002.bin.0a0a0a0a.part").write_bytes(b"torn")
    store.asked.clear()
    assert contents(fetch_dataset(URL, cache=tmp_path / "cache")) == contents(uploaded)
    assert not [name for name in store.asked if "train-00000" in name or "train-00001" in name]


def test_a_damaged_or_short_remote_file_is_named(uploaded, store, tmp_path):
    whole = (uploaded / "train-00001.bin").read_bytes()
    store.pipe_file(f"{URL}/train-00001.bin", whole[:-1] + b"\xff")
    with pytest.raises(
        DataError,
        match=r"set/train-00001\.bin, byte 0: the 200-byte block at this offset fails its checksum"
        r"\. Fix: .*flatout verify",
    ):
        fetch_dataset(URL, cache=tmp_path / "cache")
    store.pipe_file(f"{URL}/train-00001.bin", whole[:-1])
    with pytest.raises(
        DataError, match=r"set/train-00001\.bin has 199 bytes\. The manifest lists 200 bytes"
    ):
        fetch_dataset(URL, cache=tmp_path / "cache")
    store.rm_file(f"{URL}/train-00001.bin")
    with pytest.raises(
        DataError, match=r"set/train-00001\.bin is missing\. The manifest lists 200 bytes"
    ):
        fetch_dataset(URL, cache=tmp_path / "cache")
    store.pipe_file(f"{URL}/train-00001.bin", whole)
    store.pipe_file(f"{URL}/tokenizer.json", b"{}")
    with pytest.raises(DataError, match=r"set/tokenizer\.json has 2 bytes\. The manifest lists"):
        fetch_dataset(URL, cache=tmp_path / "another cache")


def test_a_damaged_copy_is_repaired(uploaded, store, tmp_path):
    copy = fetch_dataset(URL, cache=tmp_path / "cache")
    (copy / "train-00001.bin").write_bytes(b"short")
    (copy / "tokenizer.json").write_bytes(b"{}")
    store.asked.clear()
    assert contents(fetch_dataset(URL, cache=tmp_path / "cache")) == contents(uploaded)
    assert sorted(store.asked) == [
        f"get /bucket/set/{name}" for name in ("manifest.json", "tokenizer.json", "train-00001.bin")
    ]


def test_a_url_without_a_dataset_is_rejected(uploaded, store, tmp_path):
    with pytest.raises(
        DataError,
        match=r"There is no dataset at faulty://bucket/none: it has no manifest\.json.*--out faulty://bucket/none",
    ):
        fetch_dataset("faulty://bucket/none", cache=tmp_path)
    store.pipe_file(f"{URL}/manifest.json", b"\xff{")
    with pytest.raises(DataError, match=r"faulty://bucket/set/manifest\.json is not a manifest"):
        fetch_dataset(URL, cache=tmp_path)
    store.pipe_file(f"{URL}/manifest.json", json.dumps({"format_version": 99}).encode())
    with pytest.raises(DataError, match=r"set/manifest\.json has format_version 99"):
        fetch_dataset(URL, cache=tmp_path)
    store.faults[:] = [PermissionError("Access Denied")]
    with pytest.raises(
        DataError, match=r"Reading faulty://bucket/set/manifest\.json is not allowed: Access Denied"
    ):
        fetch_dataset(URL, cache=tmp_path)


def test_a_dataset_url_must_not_contain_secrets(tmp_path):
    for address in ("s3://key:hidden@bucket/set", "https://host/set?sig=hidden"):
        with pytest.raises(
            DataError, match="must not contain a user, a password or a query"
        ) as refused:
            open_dataset(address, cache=tmp_path)
        assert "hidden" not in str(refused.value)
    with pytest.raises(DataError, match="is a directory on this machine"):
        open_dataset("file:///data/set", cache=tmp_path)
    with pytest.raises(DataError, match="does not name a directory"):
        open_dataset("s3:///", cache=tmp_path)
    assert dataset_url("s3://bucket/set//") == "s3://bucket/set"
    assert absolute_path_or_url("s3://bucket/set") == "s3://bucket/set"
    assert absolute_path_or_url("/data/../set") == "/data/../set"


def test_a_full_disk_is_reported_before_anything_is_fetched(uploaded, store, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(
        DataError,
        match=r"needs \d+ bytes, but only 100 bytes are free in .*cache",
    ):
        fetch_dataset(URL, cache=tmp_path / "cache")
    assert store.asked == ["get /bucket/set/manifest.json"]


def test_a_cache_that_cannot_be_written_is_an_error(uploaded, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"Cannot write .*cache.*: Not a directory") as caught:
        fetch_dataset(URL, cache=tmp_path / "cache")
    assert "the environment variable FLATOUT_CACHE" in caught.value.fix


def test_one_process_fetches_and_the_other_waits(uploaded, store, tmp_path, said):
    """The test holds the lock as another process would, and meanwhile writes the copy."""
    home = cache_dir_of(URL, tmp_path / "cache")
    home.mkdir(parents=True)
    copy = copy_dir_of(home, (uploaded / "manifest.json").read_bytes())
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(fetch_dataset(URL, cache=tmp_path / "cache", progress=said))
    )
    thread.start()
    while not said.lines:
        thread.join(0.01)
    assert said.lines == [f"Another process is fetching or preparing {URL}. Waiting for it."]
    shutil.copytree(uploaded, copy)
    os.close(lock)
    thread.join()
    assert found == [copy]
    assert store.asked == ["get /bucket/set/manifest.json"]
