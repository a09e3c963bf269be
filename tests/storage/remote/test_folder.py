"""A directory at a URL: how a file is sent, and what a failure leaves."""

import errno
import os
from pathlib import Path

import pytest

from flatout.errors import DataError
from flatout.storage.remote import connection
from flatout.storage.remote import folder as folder_module
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.folder import RemoteFolder


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_not_tried_again(tmp_path, monkeypatch, number):
    folder = RemoteFolder(f"file://{tmp_path}/there")

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    pauses = []
    monkeypatch.setattr(connection, "sleep", pauses.append)
    monkeypatch.setattr(folder_module, "copy_local", refuse)
    with pytest.raises(DataError, match=f"Cannot write file://.*{os.strerror(number)}") as raised:
        folder.send(Path(__file__), "a")
    assert raised.value.fix == "Choose a directory that can be written."
    assert pauses == []


def test_credentials_that_only_read_are_a_possible_cause(monkeypatch, tmp_path):
    folder = RemoteFolder(f"file://{tmp_path}/there")
    folder.url = "gs://bucket/there"

    def refuse(*_, **__):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(folder._filesystem), "put_file", refuse)
    with pytest.raises(DataError, match=r"Writing gs://bucket/there is not allowed") as raised:
        folder.send(Path(__file__), "a")
    assert raised.value.fix.endswith("The account must be allowed to write.")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = RemoteFolder(f"file://{tmp_path}/there")

    def put(text):
        (tmp_path / "here").write_text(text)
        folder.send(tmp_path / "here", "metrics.jsonl")

    put("first")

    def cut(source, target):
        Path(target).write_text("sec")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.shutil, "copyfile", cut)
        with pytest.raises(KeyboardInterrupt):
            put("second")
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == "first"
    assert list(folder.files()) == ["metrics.jsonl"]
    put("second")
    (written,) = (tmp_path / "there").iterdir()  # what the kill left is gone
    assert written.read_text() == "second"


def test_a_full_disk_is_named_and_not_tried_again(tmp_path, monkeypatch):
    folder = RemoteFolder(f"file://{tmp_path}/there")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(connection, "sleep", pytest.fail)
    monkeypatch.setattr(folder_module, "copy_local", refuse)
    with pytest.raises(Unreachable, match=r"Cannot write file:.*No space left") as raised:
        folder.send(Path(__file__), "a")
    assert raised.value.fix.startswith("Free space there.")


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError("no screen"), TimeoutError("slow"), KeyError("bug"), DataError("x", fix="y")],
    ids=lambda error: type(error).__name__,
)
def test_what_a_callback_raises_is_raised_at_once_as_it_is(store, tmp_path, monkeypatch, error):
    (tmp_path / "a").write_text("text")
    called = []

    def advance(moved):
        called.append(moved)
        if moved:
            raise error

    monkeypatch.setattr(connection, "sleep", pytest.fail)
    with pytest.raises(type(error)) as raised:
        RemoteFolder("faulty://bucket/there").send(tmp_path / "a", "a", None, advance)
    assert raised.value is error
    assert [moved for moved in called if moved] == [4]


def test_a_file_or_the_whole_directory_is_removed_if_it_is_there(store, tmp_path):
    folder = RemoteFolder("faulty://bucket/there")
    (tmp_path / "a").write_text("text")
    for name in ("a", "b"):
        folder.send(tmp_path / "a", name)
    folder.remove("a")
    folder.remove("a")
    assert list(folder.files()) == ["b"]
    folder.remove()
    folder.remove()
    assert folder.files() == {}
