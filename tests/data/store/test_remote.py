"""A data set at an address is read as the folder it was: fetched once, checked, gone on with where
it broke off.
"""

import fcntl
import json
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from flatout.config.schema import DataConfig
from flatout.data.store.mix import open_data, parts_of
from flatout.data.store.remote import (
    absolute_place,
    copy_of,
    home_of,
    local_copy,
    open_place,
    stored_address,
)
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, DataError
from flatout.sources.remote import Unreachable

ADDRESS = "faulty://bucket/set"


@pytest.fixture
def upload(store):
    """Put a folder at an address."""

    def put(folder, address=ADDRESS):
        for path in folder.iterdir():
            store.put_file(str(path), f"{address}/{path.name}")
        store.asked.clear()

    return put


@pytest.fixture
def uploaded(write_set, upload):
    """The folder of a data set with several shards, which is also at ADDRESS."""
    folder = write_set(np.arange(300), [7, 8, 9], shard_bytes=200)
    upload(folder)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_fetched_once_and_read_as_the_folder_it_was(uploaded, store, tmp_path, said):
    dataset = open_place(ADDRESS + "/", cache=tmp_path / "cache")
    assert contents(dataset.path) == contents(uploaded)
    assert dataset.place == ADDRESS
    assert dataset.split("train").read_tokens(0, 300).tolist() == list(range(300))
    assert dataset.path.parent == home_of(ADDRESS, tmp_path / "cache")
    assert sorted(store.asked) == [f"get /bucket/set/{name}" for name in sorted(contents(uploaded))]
    store.asked.clear()
    again = open_place(ADDRESS, cache=tmp_path / "cache", progress=said)
    assert again.path == dataset.path
    assert store.asked == ["get /bucket/set/manifest.json"]
    assert said.lines == []


def test_a_folder_is_opened_where_it_is(uploaded, store):
    assert open_place(uploaded).path == uploaded
    assert open_place(str(uploaded)).place == str(uploaded)
    assert store.asked == []


def test_a_configuration_may_name_addresses(uploaded, upload, write_set, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    upload(write_set([1, 2, 3], name="other"), "faulty://bucket/other")
    alone = open_data(DataConfig(path=ADDRESS))
    assert [(part.name, part.dataset.place) for part in parts_of(alone)] == [("set", ADDRESS)]
    mixed = open_data(DataConfig(mix={ADDRESS: 1, "faulty://bucket/other": 1, str(uploaded): 2}))
    assert [part.name for part in mixed.parts] == [
        "bucket/set",
        "bucket/other",
        f"{tmp_path.name}/set",
    ]
    with pytest.raises(ConfigError, match=f"names {ADDRESS} twice"):
        open_data(DataConfig(mix={f"{ADDRESS}/": 1, ADDRESS: 1}))


def test_a_changed_data_set_is_noticed_and_the_old_copy_stays(
    uploaded, upload, write_set, tmp_path, said
):
    old = local_copy(ADDRESS, cache=tmp_path / "cache")
    upload(write_set([5, 6, 7], name="new"))
    new = local_copy(ADDRESS, cache=tmp_path / "cache", progress=said)
    assert Dataset.open(new).split("train").read_tokens(0, 3).tolist() == [5, 6, 7]
    assert contents(old) == contents(uploaded)
    assert said.lines == [
        f"{ADDRESS} has changed. What it was before stays in {old}; remove it when no run reads it."
    ]


def test_where_the_store_does_not_answer_the_copy_is_read_and_that_is_said(
    uploaded, store, upload, write_set, tmp_path, said
):
    store.faults[:] = [OSError("no route")] * 5
    with pytest.raises(Unreachable, match=r"set/manifest\.json: no route \(5 attempts\)"):
        local_copy(ADDRESS, cache=tmp_path / "cache")
    first = local_copy(ADDRESS, cache=tmp_path / "cache")
    os.utime(first, (0, 0))
    upload(write_set([5, 6, 7], name="new"))
    second = local_copy(ADDRESS, cache=tmp_path / "cache")
    store.faults[:] = [OSError("no route")]
    assert local_copy(ADDRESS, cache=tmp_path / "cache", progress=said) == second
    assert said.lines == [
        f"Cannot read {ADDRESS}/manifest.json: no route (1 attempt). The copy of it in {second} is read."
    ]
    (second / "train-00000.bin").unlink()
    (second.parent / "broken").mkdir()
    (second.parent / "broken" / "manifest.json").write_text("{")
    store.faults[:] = [OSError("no route")]
    assert local_copy(ADDRESS, cache=tmp_path / "cache") == first


def test_a_fetch_that_broke_off_goes_on_by_file(uploaded, store, tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.data.store.transfers.AT_ONCE", 1)
    store.faults[:] = [None, None, None, *[OSError("it broke")] * 5]
    with pytest.raises(
        Unreachable,
        match=r"Cannot read faulty://bucket/set/train-00002\.bin at byte 0: it broke \(5 attempts\)",
    ):
        local_copy(ADDRESS, cache=tmp_path / "cache")
    (copy,) = (path for path in home_of(ADDRESS, tmp_path / "cache").iterdir() if path.is_dir())
    there = {path.name for path in copy.iterdir()}
    assert {"train-00000.bin", "train-00001.bin"} <= there, (
        "what was queued behind the one that failed may have come too"
    )
    assert "train-00002.bin" not in there
    (copy / "train-00002.bin.0a0a0a0a.part").write_bytes(b"torn")
    store.asked.clear()
    assert contents(local_copy(ADDRESS, cache=tmp_path / "cache")) == contents(uploaded)
    assert not [name for name in store.asked if "train-00000" in name or "train-00001" in name]


def test_what_fails_once_is_asked_for_again(uploaded, store, tmp_path):
    store.faults[:] = [None, TimeoutError("slow"), OSError("500"), None, ConnectionError("gone")]
    assert contents(local_copy(ADDRESS, cache=tmp_path / "cache")) == contents(uploaded)


def test_a_file_that_is_damaged_or_short_at_the_store_is_named(uploaded, store, tmp_path):
    whole = (uploaded / "train-00001.bin").read_bytes()
    store.pipe_file(f"{ADDRESS}/train-00001.bin", whole[:-1] + b"\xff")
    with pytest.raises(
        DataError,
        match=r"set/train-00001\.bin, byte 0: the block of 200 bytes from there fails its checksum\. Fix: .*flatout verify",
    ):
        local_copy(ADDRESS, cache=tmp_path / "cache")
    store.pipe_file(f"{ADDRESS}/train-00001.bin", whole[:-1])
    with pytest.raises(
        DataError, match=r"set/train-00001\.bin has 199 bytes; the manifest says 200 bytes"
    ):
        local_copy(ADDRESS, cache=tmp_path / "cache")
    store.rm_file(f"{ADDRESS}/train-00001.bin")
    with pytest.raises(
        DataError, match=r"set/train-00001\.bin is missing; the manifest says 200 bytes"
    ):
        local_copy(ADDRESS, cache=tmp_path / "cache")
    store.pipe_file(f"{ADDRESS}/train-00001.bin", whole)
    store.pipe_file(f"{ADDRESS}/tokenizer.json", b"{}")
    with pytest.raises(
        DataError, match=r"set/tokenizer\.json is not the tokenizer that made these tokens"
    ):
        local_copy(ADDRESS, cache=tmp_path / "cache")


def test_a_damaged_copy_is_mended(uploaded, store, tmp_path):
    copy = local_copy(ADDRESS, cache=tmp_path / "cache")
    (copy / "train-00001.bin").write_bytes(b"short")
    (copy / "tokenizer.json").write_bytes(b"{}")
    store.asked.clear()
    assert contents(local_copy(ADDRESS, cache=tmp_path / "cache")) == contents(uploaded)
    assert sorted(store.asked) == [
        f"get /bucket/set/{name}" for name in ("manifest.json", "tokenizer.json", "train-00001.bin")
    ]


def test_what_is_no_data_set_is_said(uploaded, store, tmp_path):
    with pytest.raises(
        DataError,
        match=r"There is no data set at faulty://bucket/none: it has no manifest\.json.*--out faulty://bucket/none",
    ):
        local_copy("faulty://bucket/none", cache=tmp_path)
    store.pipe_file(f"{ADDRESS}/manifest.json", b"\xff{")
    with pytest.raises(DataError, match=r"faulty://bucket/set/manifest\.json is not a manifest"):
        local_copy(ADDRESS, cache=tmp_path)
    store.pipe_file(f"{ADDRESS}/manifest.json", json.dumps({"format_version": 99}).encode())
    with pytest.raises(DataError, match=r"set/manifest\.json has format_version 99"):
        local_copy(ADDRESS, cache=tmp_path)
    store.faults[:] = [PermissionError("Access Denied")]
    with pytest.raises(
        DataError, match=r"Reading faulty://bucket/set/manifest\.json is not allowed: Access Denied"
    ):
        local_copy(ADDRESS, cache=tmp_path)


def test_addresses_of_data_sets_hold_no_secrets(tmp_path):
    for address in ("s3://key:hidden@bucket/set", "https://host/set?sig=hidden"):
        with pytest.raises(DataError, match="no user, no password and no query") as refused:
            open_place(address, cache=tmp_path)
        assert "hidden" not in str(refused.value)
    with pytest.raises(DataError, match="is a folder of this machine"):
        open_place("file:///data/set", cache=tmp_path)
    with pytest.raises(DataError, match="names no place"):
        open_place("s3:///", cache=tmp_path)
    assert stored_address("s3://bucket/set//") == "s3://bucket/set"
    assert absolute_place("s3://bucket/set") == "s3://bucket/set"
    assert absolute_place("/data/../set") == "/data/../set"


def test_a_full_disk_is_told_before_anything_is_fetched(uploaded, store, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(
        DataError,
        match=r"Fetching faulty://bucket/set takes 0\.0 MB, and 0\.0 MB are free in .*cache",
    ):
        local_copy(ADDRESS, cache=tmp_path / "cache")
    assert store.asked == ["get /bucket/set/manifest.json"]


def test_a_cache_that_cannot_be_written_is_said(uploaded, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"Cannot write .*cache.*: Not a directory"):
        local_copy(ADDRESS, cache=tmp_path / "cache")


def test_of_two_processes_one_fetches_and_the_other_waits(uploaded, store, tmp_path, said):
    """This one holds the lock as another process would, and puts the copy there meanwhile."""
    home = home_of(ADDRESS, tmp_path / "cache")
    home.mkdir(parents=True)
    copy = copy_of(home, (uploaded / "manifest.json").read_bytes())
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(local_copy(ADDRESS, cache=tmp_path / "cache", progress=said))
    )
    thread.start()
    while not said.lines:
        thread.join(0.01)
    assert said.lines == [f"Another process is fetching or preparing {ADDRESS}; waiting for it."]
    shutil.copytree(uploaded, copy)
    os.close(lock)
    thread.join()
    assert found == [copy]
    assert store.asked == ["get /bucket/set/manifest.json"]
