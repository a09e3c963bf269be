import hashlib

import pytest

from flatout.errors import DataError
from flatout.storage.remote import connection, download

CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch, web):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    web.files["/input.txt"] = CONTENT


def fetch(web, target):
    url = f"{web.address}/input.txt"
    return download.download(url, target, sha256=SHA256, num_bytes=len(CONTENT))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_downloaded_once(web, tmp_path):
    target = tmp_path / "cache" / "input.txt"
    assert fetch(web, target) == target
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["input.txt"]
    web.asked.clear()
    fetch(web, target)
    assert not web.asked


def test_a_changed_file_is_downloaded_again(web, tmp_path):
    (tmp_path / "input.txt").write_bytes(b"changed")
    fetch(web, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("faults", [[], ["503", "429"]])
def test_a_failed_request_is_tried_again(web, tmp_path, ranges, faults):
    web.ranges, web.faults = ranges, [*faults]
    fetch(web, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT
    assert names(tmp_path) == ["input.txt"]


def test_a_file_that_does_not_match_the_checksum_is_removed(web, tmp_path):
    web.files["/input.txt"] = b"evil"
    with pytest.raises(DataError, match=f"{hashlib.sha256(b'evil').hexdigest()}, not {SHA256}"):
        fetch(web, tmp_path / "input.txt")
    assert names(tmp_path) == []


def test_a_missing_file_is_not_retried(web, tmp_path):
    del web.files["/input.txt"]
    web.statuses["/input.txt"] = 404
    requests, answer = [], web.answer

    def counted(handler, *, body):
        requests.append(handler.path)
        answer(handler, body=body)

    web.answer = counted
    with pytest.raises(DataError, match=r"There is nothing at .*--from"):
        fetch(web, tmp_path / "input.txt")
    assert 1 <= len(requests) < connection.ATTEMPTS


def test_a_server_that_does_not_answer_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"Cannot read http://127\.0\.0\.1:9/.*5 attempts.*--from"):
        download.download("http://127.0.0.1:9/input.txt", tmp_path / "input.txt", sha256=SHA256)


def test_a_target_that_cannot_be_written_is_an_error(web, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="Cannot write") as caught:
        fetch(web, tmp_path / "file" / "input.txt")
    assert "Make it writable" in caught.value.fix
    assert "the environment variable FLATOUT_CACHE" in caught.value.fix


def test_a_local_file_is_checked(tmp_path):
    (tmp_path / "a.txt").write_bytes(CONTENT)
    download.check_file(tmp_path / "a.txt", SHA256)
    (tmp_path / "a.txt").write_bytes(b"other")
    with pytest.raises(DataError, match=f"not {SHA256}"):
        download.check_file(tmp_path / "a.txt", SHA256)
    with pytest.raises(DataError, match="Cannot read"):
        download.check_file(tmp_path / "b.txt", SHA256)
