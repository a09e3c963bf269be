"""Directories are complete or absent, here and at a URL, whatever is killed or fails."""

import json
import os
import shutil
from hashlib import md5

import numpy as np
import pytest

from flatout.errors import DataError
from flatout.progress import SILENT
from flatout.storage import whole
from flatout.storage.files import CheckedFile, FileEntry
from flatout.storage.remote import parallel
from flatout.storage.remote.connection import NothingThere
from flatout.storage.whole import (
    MANIFEST,
    Altered,
    Listing,
    damage_of,
    entry_of,
    name_of,
    problem_of,
    pull,
    push,
    replacing,
    sweep,
)

URL = "faulty://bucket/set"
A, B = "a" * 16, "b" * 16
"""What ends the names of unfinished directories."""
OTHERS = ["out.pull", f"outer.part-{A}", f"x.old-{A}"]
BY_HAND = ["out.old-20241130", "out.old-best", "out.part-2"]
TEXT = {"a": b"text of a", "b": b"text of b"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, text):
    with replacing(folder) as unfinished:
        (unfinished / MANIFEST).write_text(text)
        assert not folder.exists() or names(folder) == [MANIFEST]


@pytest.fixture
def directory(tmp_path):
    """A whole directory of two files."""
    with replacing(tmp_path / "here") as unfinished:
        for name, content in TEXT.items():
            (unfinished / name).write_bytes(content)
        files = [entry_of(unfinished / name).model_dump() for name in TEXT]
        (unfinished / MANIFEST).write_text(json.dumps({"files": files}))
    return tmp_path / "here"


def test_a_directory_takes_its_name_when_it_is_complete(tmp_path):
    for text in ("first", "second"):
        write(tmp_path / "out", text)
        assert (tmp_path / "out" / MANIFEST).read_text() == text
        assert names(tmp_path) == ["out"]


def test_an_error_leaves_the_earlier_directory_as_it_was(tmp_path, monkeypatch):
    write(tmp_path / "out", "first")

    def fail():
        with replacing(tmp_path / "out") as unfinished:
            (unfinished / MANIFEST).write_text("second")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    rename = type(tmp_path).rename

    def refused(self, target):
        if target == tmp_path / "out" and ".part-" in self.name:
            raise PermissionError
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "rename", refused)
        with pytest.raises(PermissionError):
            write(tmp_path / "out", "second")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MANIFEST).read_text() == "first"


def test_what_somebody_else_is_writing_is_not_swept(tmp_path):
    with replacing(tmp_path / "out") as one:
        (one / MANIFEST).write_text("first")
        write(tmp_path / "out", "second")
        assert sweep(tmp_path, "out") == []
        assert (one / MANIFEST).read_text() == "first"
    assert (tmp_path / "out" / MANIFEST).read_text() == "first"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("left", "found", "removed"),
    [
        ([f"out.old-{A}", f"out.part-{B}"], ["out"], [f"out.part-{B}"]),
        (["out", f"out.old-{A}"], ["out"], [f"out.old-{A}"]),
        ([f"out.part-upload-{A}"], [], [f"out.part-upload-{A}"]),
        (OTHERS, OTHERS, []),
        (BY_HAND, BY_HAND, []),
    ],
    ids=[
        "killed while replacing",
        "killed while deleting",
        "killed while sending",
        "of others",
        "named by hand",
    ],
)
def test_the_leftovers_of_kills_are_swept(tmp_path, left, found, removed):
    for name in left:
        (tmp_path / name / "inside").mkdir(parents=True)
    assert sweep(tmp_path, "out") == removed
    assert names(tmp_path) == found


def test_what_another_process_deletes_meanwhile_is_no_error(tmp_path, monkeypatch):
    (tmp_path / f"out.part-{A}").mkdir()
    (tmp_path / f"out.part-{A}" / "file").touch()
    delete, vanished = os.unlink, []

    def racing(path, **options):
        delete(path, **options)
        if not vanished:
            vanished.append(path)
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", racing)
    assert sweep(tmp_path, "out") == [f"out.part-{A}"]
    assert vanished
    assert names(tmp_path) == []


@pytest.mark.parametrize("has_blocks", [False, True], ids=["SHA-256", "CRC of blocks"])
def test_a_file_is_compared_with_its_entry(tmp_path, has_blocks):
    path = tmp_path / "file"
    with CheckedFile(path) as file:
        file.write(np.frombuffer(b"content", np.uint8))
    made = file.close() if has_blocks else entry_of(path)
    entry = FileEntry.model_validate_json(made.model_dump_json())
    assert problem_of(path, entry) is None
    path.write_bytes(b"CONTENT")
    assert problem_of(path, entry, deep=False) is None
    assert problem_of(path, entry) == (
        f"{path} is damaged: its content does not match its checksum."
    )
    path.write_bytes(b"more content")
    assert problem_of(path, entry) == f"{path} has 12 bytes, not 7."
    path.unlink()
    assert problem_of(path, entry) == f"{path} is missing."


def test_all_damage_in_a_directory_is_listed_in_order(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.bin" for number in range(12)]
    for path in paths:
        path.write_bytes(b"content")
    entries = list(map(entry_of, paths))
    assert damage_of(tmp_path, entries) == []
    paths[11].write_bytes(b"CONTENT")
    paths[3].unlink()
    opened = os.open

    def closed(path, *how, **more):
        if path == paths[7]:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(os, "open", closed)
    assert damage_of(tmp_path, entries) == [
        f"{paths[3]} is missing.",
        f"{paths[7]} cannot be read: Permission denied.",
        f"{paths[11]} is damaged: its content does not match its checksum.",
    ]


def test_an_entry_lists_one_kind_of_checksum(tmp_path):
    with CheckedFile(tmp_path / "file") as file:
        pass
    assert set(file.close().model_dump()) == {"name", "size_bytes", "block_crc32"}
    assert set(entry_of(tmp_path / "file").model_dump()) == {"name", "size_bytes", "sha256"}


def puts(store):
    return [line.rpartition("/")[2] for line in store.asked if line.startswith("put")]


def send(directory, **options):
    return push(directory, URL, list(TEXT), **options)


def fetch(target, store):
    manifest = store.cat(f"{URL}/{MANIFEST}")
    files = Listing.model_validate_json(manifest).files
    pull(URL, target, manifest, files, fix="Look.", progress=SILENT)


def test_the_manifest_is_sent_last_and_nothing_is_sent_twice(store, directory, monkeypatch):
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 1)
    order = []
    assert send(directory, before_manifest=lambda: order.extend(puts(store))) == 18
    assert (order, puts(store)) == (["a", "b"], ["a", "b", MANIFEST])
    store.asked.clear()
    send(directory)
    assert puts(store) == [MANIFEST]


def test_an_interrupted_call_is_continued_by_content(store, directory, monkeypatch):
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 1)
    monkeypatch.setattr(type(store), "tags", lambda text: {"ETag": md5(text).hexdigest()})
    store.faults[:] = [None, PermissionError("not today")]
    with pytest.raises(DataError, match="not today"):
        send(directory)
    assert puts(store) == ["a", "b"]
    store.asked.clear()
    send(directory)
    assert puts(store) == ["b", MANIFEST]
    store.pipe_file(f"{URL}/a", b"TEXT OF a")
    store.asked.clear()
    send(directory)
    assert puts(store) == ["a", MANIFEST]


def test_a_manifest_that_arrives_cut_is_removed(store, directory, monkeypatch):
    """The store rejects to read it, as S3 does when a checksum does not match."""
    put = store.put_file

    def cut(lpath, rpath, **options):
        put(lpath, rpath, **options)
        if rpath.endswith(MANIFEST):
            store.pipe_file(rpath, b"{")

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "put_file", staticmethod(cut))
        with pytest.raises(DataError, match=r"manifest\.json differs from the file that was sent"):
            send(directory)
    assert not store.exists(f"{URL}/{MANIFEST}")
    send(directory)
    assert store.exists(f"{URL}/{MANIFEST}")


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_sent_comes_back(store, directory, tmp_path, packed):
    (tmp_path / "work").mkdir()
    send(directory, packed_in=tmp_path / "work" if packed else None)
    assert store.exists(f"{URL}/a{'.zst' * packed}")
    assert names(tmp_path / "work") == []
    fetch(tmp_path / "copy", store)
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {
        path.name: path.read_bytes() for path in directory.iterdir()
    }


def test_a_file_that_is_not_as_listed_is_named_and_what_is_whole_stays(
    store, directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 1)
    send(directory)
    target, part = tmp_path / "copy", tmp_path / "copy.pull"
    for content, message, error in (
        (b"TEXT OF b", "is damaged: its content does not match its checksum", Altered),
        (b"text", "has 4 bytes", Altered),
        (b"text of bb", "is damaged: it has more than the 9 bytes", Altered),
        (None, "There is nothing at", NothingThere),
    ):
        if content is None:
            store.rm_file(f"{URL}/b")
        else:
            store.pipe_file(f"{URL}/b", content)
        with pytest.raises(error, match=message) as raised:
            fetch(target, store)
        assert f"{URL}/b" in raised.value.what
        assert [name for name in names(part) if not name.endswith(".part")] == ["a"]
        assert not target.exists()
    (part / "of an earlier version").touch()
    store.pipe_file(f"{URL}/b", TEXT["b"])
    store.asked.clear()
    fetch(target, store)
    assert [line for line in store.asked if line.endswith("/a")] == []
    assert names(target) == ["a", "b", MANIFEST]
    assert not part.exists()


def test_a_disk_that_is_too_small_is_named_before_anything_is_fetched(
    store, directory, tmp_path, monkeypatch
):
    send(directory)
    usage = shutil.disk_usage(tmp_path)._replace(free=17)
    monkeypatch.setattr(whole.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError, match="needs 18 bytes, but only 17 bytes are free"):
        fetch(tmp_path / "copy", store)


def test_a_name_at_a_url_has_the_digest_of_the_manifest():
    assert name_of("step-3", b"{}") == "step-3-44136fa3"
    assert name_of("step-3", b"{ }") != name_of("step-3", b"{}")
