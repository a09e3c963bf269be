import gzip
import hashlib
import pickle
import random

import pytest

from flatout.data.sources import BadRow, Document, LeftOut, file_reading, files, long
from flatout.data.sources.long import LongText, chunks_of, measure, utf8
from flatout.data.sources.packed import is_packed
from flatout.errors import DataError

TEXTS = {
    "ascii": "one two\r\nthree " * 9,
    "characters of every length": "aé€🙂" * 40,
    "a mark inside": "a\ufeffb" * 30,
    "two marks": "\ufeff\ufefftext " * 5,
    "a half at the end of a block": "abcdef€",
}


def whole(text):
    return "".join(text.chunks())


def written(path, data):
    path.write_bytes(gzip.compress(data) if is_packed(path.name) else data)
    return path


def read(path):
    (row,) = (row for part in files.files(str(path)) for row in part.rows())
    return row


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_a_text_read_in_chunks_equals_the_text_read_whole(tmp_path, monkeypatch, block, text, name):
    path = written(tmp_path / name, text.encode())
    held = read(path)
    monkeypatch.setattr(long, "CHUNK_BYTES", block)
    monkeypatch.setattr(file_reading, "LONG_BYTES", 4)
    row = read(path)
    assert isinstance(row.text, LongText)
    assert (row.location, len(row.text), whole(row.text)) == (
        held.location,
        len(held.text),
        held.text,
    )
    assert (row.text.num_bytes, row.text.sha256) == (
        len(held.text.encode()),
        hashlib.sha256(held.text.encode()).digest(),
    )
    assert whole(pickle.loads(pickle.dumps(row.text))) == held.text


@pytest.mark.parametrize(
    "data",
    [
        b"caf\xe9 au lait",
        b"abcdefgh\xe2\x82",
        b"\xef\xbb\xbfabcd\xff",
        b"ab\xed\xa0\x80cd",
        b"abcd\xf0\x9f\x99x",
        "é€".encode() * 9 + b"\xc0",
    ],
)
@pytest.mark.parametrize("block", [1, 2, 5, 1 << 20])
def test_long_and_short_text_that_is_not_utf8_give_the_same_error(
    tmp_path, monkeypatch, data, block
):
    path = written(tmp_path / "a.txt", data)
    held = read(path)
    monkeypatch.setattr(long, "CHUNK_BYTES", block)
    monkeypatch.setattr(file_reading, "LONG_BYTES", 2)
    row = read(path)
    assert isinstance(row, BadRow)
    assert (str(row.error), row.reason, row.location) == (
        str(held.error),
        held.reason,
        held.location,
    )


def test_the_decompressed_size_decides_what_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(file_reading, "LONG_BYTES", 1000)
    written(tmp_path / "a.txt", b"x" * 1000)
    written(tmp_path / "b.txt.gz", b"x" * 1001)
    written(tmp_path / "c.txt.gz", b"x" * 1000)
    found = [row.text for part in files.files(str(tmp_path)) for row in part.rows()]
    assert [type(text) for text in found] == [str, LongText, str]
    assert (tmp_path / "b.txt.gz").stat().st_size < 1000


def test_a_long_file_with_only_a_byte_order_mark_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(file_reading, "LONG_BYTES", 2)
    path = written(tmp_path / "a.txt", b"\xef\xbb\xbf")
    assert read(path) == LeftOut("empty document", str(path))


def test_a_truncated_long_file_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(file_reading, "LONG_BYTES", 2)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(random.Random(0).randbytes(9_000).hex().encode())[:-9])
    assert read(path).reason == "cannot be read"


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_slices_and_first_bytes_match_a_string(tmp_path, monkeypatch, block):
    monkeypatch.setattr(long, "CHUNK_BYTES", block)
    text = "\ufeffaé€🙂 and so on"
    path = written(tmp_path / "a.txt", b"\xef\xbb\xbf" + text.encode())
    stretch = measure(str(path))
    for start in range(len(text) + 1):
        for stop in range(start, len(text) + 1):
            for cut in (stretch[start:stop], stretch[:stop][start:]):
                piece = text[start:stop].encode()
                assert (whole(cut).encode(), len(cut), cut.num_bytes, cut.sha256) == (
                    piece,
                    stop - start,
                    len(piece),
                    hashlib.sha256(piece).digest(),
                )
    for limit in range(len(text.encode()) + 3):
        assert whole(stretch.first_bytes(limit)) == text.encode()[:limit].decode(errors="ignore")
        assert whole(stretch[3:].first_bytes(limit)) == text[3:].encode()[:limit].decode(
            errors="ignore"
        )


def test_a_file_that_changes_after_it_was_measured_is_an_error(tmp_path):
    path = written(tmp_path / "a.txt", b"x" * 100)
    text = measure(str(path))
    path.write_bytes(b"x" * 99)
    with pytest.raises(DataError, match=r"a\.txt changed while it was being read"):
        whole(text)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        text[1:]


def test_a_string_has_chunks_too(monkeypatch):
    monkeypatch.setattr(long, "CHUNK_BYTES", 4)
    assert list(chunks_of("abcd")) == ["abcd"]
    assert list(chunks_of("abcdefghi")) == ["abcd", "efgh", "i"]


def test_documents_are_equal_with_long_and_short_text(tmp_path, monkeypatch):
    """Code that counts and names documents relies on nothing else."""
    monkeypatch.setattr(file_reading, "LONG_BYTES", 2)
    path = written(tmp_path / "a.txt", b"long")
    assert read(path) == Document(measure(str(path)), str(path))
    assert str(read(path).location) == str(path)


def test_utf8_of_a_text_is_that_of_encode():
    for text in ("Käfer", "Käfer" * 2, "ok", "Käfer", ""):
        assert utf8(text) is utf8(text)
        assert utf8(text) == text.encode()
    half = "a\ud800"
    assert utf8(half, "replace") == b"a?"
    assert utf8(half, "surrogatepass") == b"a\xed\xa0\x80"
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        utf8(half)
