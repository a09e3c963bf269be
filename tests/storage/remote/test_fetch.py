"""A file at a URL that is fetched once, and compared with what is known of it."""

import hashlib

import pytest

from flatout.errors import DataError
from flatout.storage.files import FileEntry
from flatout.storage.remote import connection
from flatout.storage.whole import Altered, fetch_checked

CONTENT = bytes(range(256)) * 100
ENTRY = FileEntry(
    name="input.txt", size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch, web):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    web.files["/input.txt"] = CONTENT


def fetch(url, target):
    fetch_checked(url, target, ENTRY, lambda _: None, fix="Name another.")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("faults", [[], ["503", "429"]])
@pytest.mark.parametrize("before", [None, b"changed"])
def test_a_file_is_fetched_unless_it_is_there(web, tmp_path, faults, before):
    target = tmp_path / "input.txt"
    if before:
        target.write_bytes(before)
    web.faults = [*faults]
    fetch(f"{web.address}/input.txt", target)
    assert target.read_bytes() == CONTENT
    assert names(tmp_path) == ["input.txt"]
    web.asked.clear()
    fetch(f"{web.address}/input.txt", target)
    assert not web.asked


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"evil", "input.txt has 4 bytes, not 25600"),
        (CONTENT[::-1], "input.txt is damaged: its content does not match its checksum"),
        (CONTENT * 2, "more than the 25,600 bytes"),
        (None, "There is nothing at .*/input.txt"),
    ],
)
def test_a_different_file_is_not_kept(web, tmp_path, content, words):
    web.files["/input.txt"] = content
    if content is None:
        del web.files["/input.txt"]
    with pytest.raises(DataError, match=words) as raised:
        fetch(f"{web.address}/input.txt", tmp_path / "input.txt")
    assert not (tmp_path / "input.txt").exists()
    assert not isinstance(raised.value, Altered) or raised.value.fix == "Name another."


def test_a_server_that_does_not_answer_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"Cannot read http://127\.0\.0\.1:9/.*5 attempts"):
        fetch("http://127.0.0.1:9/input.txt", tmp_path / "input.txt")
