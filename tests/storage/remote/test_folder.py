"""Folders at a URL: what is sent and fetched, in which order, and what a failure leaves."""

import errno
import os

import pytest

from flatout.errors import DataError
from flatout.progress import SILENT
from flatout.storage.files import entry_of
from flatout.storage.remote import connection, parallel
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.folder import CLAIM, Altered, Claim, RemoteFolder, Wanted, pull, push

URL = "faulty://bucket/set"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT])
def test_a_directory_that_cannot_be_written_is_not_tried_again(tmp_path, monkeypatch, number):
    folder = RemoteFolder(f"file://{tmp_path}/there")

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    pauses = []
    monkeypatch.setattr(connection, "sleep", pauses.append)
    monkeypatch.setattr(type(folder._filesystem), "put_file", refuse)
    with pytest.raises(DataError, match=f"Cannot write file://.*{os.strerror(number)}") as raised:
        folder.put_text("a", "b")
    assert raised.value.fix == "Make it writable for this user, or name a different directory."
    assert pauses == []


def test_credentials_that_only_read_are_a_possible_cause(monkeypatch, tmp_path):
    folder = RemoteFolder(f"file://{tmp_path}/there")
    folder.url = "gs://bucket/there"

    def refuse(*_, **__):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(folder._filesystem), "put_file", refuse)
    with pytest.raises(DataError, match=r"Writing gs://bucket/there is not allowed") as raised:
        folder.put_text("a", "b")
    assert raised.value.fix.endswith("The account must be allowed to write.")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = RemoteFolder(f"file://{tmp_path}/there")
    folder.put_text("metrics.jsonl", "first")
    put_file = type(folder._filesystem).put_file

    def cut(self, source, target, **options):
        put_file(self, source, target, **options)
        os.truncate(target, 3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(folder._filesystem), "put_file", cut)
        with pytest.raises(KeyboardInterrupt):
            folder.put_text("metrics.jsonl", "second")
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == "first"
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["metrics.jsonl"]
    (tmp_path / "there" / "metrics.jsonl.part").write_text("left by a kill")
    assert list(folder.files()) == ["metrics.jsonl"]
    folder.put_text("metrics.jsonl", "second")
    (written,) = (tmp_path / "there").iterdir()
    assert written.read_text() == "second"


def test_a_full_disk_is_named_and_not_tried_again(tmp_path, monkeypatch):
    folder = RemoteFolder(f"file://{tmp_path}/there")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(connection, "sleep", pytest.fail)
    monkeypatch.setattr(type(folder._filesystem), "put_file", refuse)
    with pytest.raises(Unreachable, match=r"its disk is full .*No space left") as raised:
        folder.put_text("a", "b")
    assert raised.value.fix == "Free space there, or name a different directory."


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
        RemoteFolder("faulty://bucket/there").put(tmp_path / "a", "a", advance)
    assert raised.value is error
    assert [moved for moved in called if moved] == [4]


@pytest.fixture
def two_files(tmp_path):
    """Return a function that sends two files, of which `sent` describes those that are there."""

    def send(remote, sent):
        for name in ("a", "b"):
            (tmp_path / name).write_text(f"text of {name}")
            remote.send(tmp_path / name, entry_of(tmp_path / name), sent.get(name))

    return send


def test_a_directory_is_claimed_first_and_its_manifest_comes_last(store, two_files):
    remote = RemoteFolder(URL)
    with push(remote, b"{}", Claim(manifest="1"), None) as sent:
        two_files(remote, sent)
    names = [line.rpartition("/")[2] for line in store.asked if line.startswith("put")]
    assert names == [CLAIM, "a", "b", "manifest.json"]
    assert sorted(remote.files()) == ["a", "b", "manifest.json"]


def test_a_failure_leaves_the_claim_and_only_the_same_claim_continues(store, two_files):
    remote, mine = RemoteFolder(URL), Claim(manifest="1", source={"of": "mine"})

    def fail():
        with push(remote, b"{}", mine, None) as sent:
            two_files(remote, sent)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert sorted(remote.files()) == ["a", "b", CLAIM]
    store.asked.clear()
    with push(remote, b"{}", mine, mine) as sent:
        two_files(remote, sent)
    assert store.asked == ["put /bucket/set/manifest.json", "get /bucket/set/manifest.json"]
    with push(remote, b"[]", Claim(manifest="2"), mine) as sent:
        assert sent == {}
    assert store.cat(f"{URL}/manifest.json") == b"[]"


def test_a_manifest_that_arrives_cut_is_removed_and_sent_again(store, two_files, monkeypatch):
    """The store rejects to read it, as S3 does when a checksum does not match."""
    remote, mine, put, get = RemoteFolder(URL), Claim(manifest="1"), store.put_file, store.cat_file

    def cut(lpath, rpath, **options):
        put(lpath, rpath, **options)
        if rpath.endswith("manifest.json"):
            store.pipe_file(rpath, b"{")

    def refused(path, **options):
        content = get(path, **options)
        if content == b"{":
            raise OSError("the checksum does not match")
        return content

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "put_file", staticmethod(cut))
        patched.setattr(type(store), "cat_file", staticmethod(refused))
        altered = pytest.raises(DataError, match=r"manifest\.json differs from the file that")
        with altered, push(remote, b"{}", mine, None) as sent:
            two_files(remote, sent)
    assert sorted(remote.files()) == ["a", "b", CLAIM]
    with push(remote, b"{}", mine, mine) as sent:
        two_files(remote, sent)
    assert sorted(remote.files()) == ["a", "b", "manifest.json"]


def test_a_directory_is_fetched_with_its_manifest_last_and_continued_by_content(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(parallel, "MAX_PARALLEL", 1)
    target = tmp_path / "copy"

    def wanted(name):
        def problem(path):
            if path.is_file() and path.read_text() == f"text of {name}":
                return None
            return f"{path} is not the text."

        return Wanted(name, 9, problem)

    def fetch():
        files = [wanted("a"), wanted("b")]
        pull(URL, b"{}", files, target, fix="Look.", more_space="buy a disk", progress=SILENT)

    store.pipe_file(f"{URL}/a", b"text of a")
    for content, message in (
        (b"TEXT OF b", "is not the text"),
        (b"text", "is not the text"),
        (b"text of bb", "is damaged: it has more than the 9 bytes"),
        (None, "is not the text"),
    ):
        if content is None:
            store.rm_file(f"{URL}/b")
        else:
            store.pipe_file(f"{URL}/b", content)
        with pytest.raises(Altered, match=f"{URL}/b {message}.*Fix: Look"):
            fetch()
        assert [path.name for path in target.iterdir()] == ["a"]
    (target / "b.0a0a.part").write_text("torn")
    store.pipe_file(f"{URL}/b", b"text of b")
    store.asked.clear()
    fetch()
    assert store.asked == ["get /bucket/set/b"]
    assert {path.name for path in target.iterdir()} == {"a", "b", "manifest.json"}
