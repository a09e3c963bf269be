import hashlib

import pytest

from flatout.errors import DataError
from flatout.storage.remote import connection, download, reading

CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def small_blocks_and_no_pauses(monkeypatch, web):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10_000)
    web.files["/input.txt"] = CONTENT


def fetch(web, target):
    url = f"{web.address}/input.txt"
    return download.download(url, target, sha256=SHA256, num_bytes=len(CONTENT))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def first_bytes(web):
    """The offset that each request started at."""
    return [int(asked.removeprefix("bytes=").partition("-")[0]) for _, asked in web.asked]


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


@pytest.mark.parametrize("fault", [1000, "503", "429"])
def test_only_the_block_that_failed_is_requested_again(web, tmp_path, fault):
    web.faults = [None, fault, fault]
    fetch(web, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT
    assert first_bytes(web) == [0, 10_000, 10_000, 10_000, 20_000]


@pytest.mark.parametrize("faults", [[], ["503", "429"]])
def test_a_server_without_ranges_sends_the_whole_file(web, tmp_path, faults):
    web.ranges = False
    web.faults = [None, *faults]
    fetch(web, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_the_next_call_resumes(web, tmp_path):
    web.faults = [None, *["500"] * 5]
    with pytest.raises(
        DataError, match=r"at byte 10,000: 500.*first 10,000 bytes are kept.*--from"
    ):
        fetch(web, tmp_path / "input.txt")
    assert names(tmp_path) == ["input.txt.part"]
    web.asked.clear()
    fetch(web, tmp_path / "input.txt")
    assert first_bytes(web) == [10_000, 20_000]
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_a_partial_file_of_other_content_restarts_the_download(web, tmp_path):
    (tmp_path / "input.txt.part").write_bytes(b"other" * 100)
    fetch(web, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT
    assert first_bytes(web)[0] == 500
    assert 0 in first_bytes(web)


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more"])
def test_a_partial_file_as_long_as_the_file_or_longer_is_handled(web, tmp_path, left):
    (tmp_path / "input.txt.part").write_bytes(left)
    fetch(web, tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


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
