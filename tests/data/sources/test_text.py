"""Text files and JSONL, read whole or by ranges of bytes, and what is not UTF-8."""

import gzip
import shlex
import shutil
import subprocess
import tracemalloc

import pytest

from flatout.data.sources import BadRow, Document, text
from flatout.data.sources import files as listed
from flatout.data.sources.fields import Fields
from flatout.data.sources.files import files
from flatout.data.sources.text import read_rows, read_text


def read_row(url, data):
    return text.not_utf8(url, url, 0, data, 3)


def rows_of(path):
    return [row for task in files(str(path)) for row in task.rows()]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("", []),
        ("one\r\ntwo\n\nthrée\x00", ["one\r\ntwo\n\nthrée\x00"]),
        ("\ufeffone", ["one"]),
        ("\ufeff", []),
        ("a\n" * 40, ["a\n" * 40]),
        ("a\n" * 41, ["a\n" * 41]),
        ("a\n" * 44, ["a\n" * 41, "a\n" * 3]),
        ("a line, 17 bytes\n" * 15, ["a line, 17 bytes\n" * 5] * 3),
        ("é" * 100, ["é" * 40, "é" * 40, "é" * 20]),
        ("€" * 60, ["€" * 27, "€" * 27, "€" * 6]),
        ("\ufeff" + "x" * 100, ["x" * 77, "x" * 23]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_is_a_document_for_each_so_many_bytes(tmp_path, monkeypatch, name, content, texts):
    monkeypatch.setattr(text, "TEXT_BYTES", 80)
    monkeypatch.setattr(listed, "TEXT_BYTES", 80)
    monkeypatch.setattr(text, "CUT_BYTES", 17)
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = [row for row in rows_of(tmp_path / name) if isinstance(row, Document)]
    assert [row.text for row in found] == texts
    assert [row.text for row in read_text(str(tmp_path / name), 0, None) if row.text] == texts
    lines = [f", line {''.join(texts[:count]).count(chr(10)) + 1}" for count in range(len(texts))]
    assert [str(row.location) for row in found] == [
        f"{tmp_path / name}{line if index else ''}" for index, line in enumerate(lines)
    ]


def test_rows_that_begin_in_a_range_are_read_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "one"}\n', b"\n", b'{"text": "two"}\n', b'{"text": "three"}']
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    for cut in range(size + 1):
        found = [
            *read_rows(str(path), 0, cut, Fields()),
            *read_rows(str(path), cut, size, Fields()),
        ]
        assert [row.text for row in found] == ["one", "two", "three"], cut
    assert [str(row.location) for row in read_rows(str(path), 17, size, Fields())] == [
        f"{path}, line 3",
        f"{path}, line 4",
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_row_that_is_too_long_is_bad_and_the_others_are_read(tmp_path, monkeypatch, name, before):
    monkeypatch.setattr(text, "ROW_BYTES", 1 << 20)
    lines = [b'{"text": "a"}\n'] * before + [
        b'{"text": "' + b"x" * (1 << 25) + b'"}\n',
        b'{"text": "b"}\n',
        b'{"text": "' + b"y" * (3 << 20),
    ]
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"".join(lines)) if name.endswith("gz") else b"".join(lines))
    tracemalloc.start()
    *good, long, after, last = read_rows(str(path), 0, None, Fields())
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert [row.text for row in [*good, after]] == ["a"] * before + ["b"]
    for bad, number in ((long, before + 1), (last, before + 3)):
        assert isinstance(bad, BadRow)
        assert (bad.reason, str(bad.location)) == ("too long", f"{path}, line {number}")
        assert "is longer than 1 MiB" in str(bad.error)
        assert "a separate text file, which is cut where it is too long" in bad.error.fix


@pytest.mark.parametrize(
    ("encoding", "content", "what", "named"),
    [
        ("utf-16", "Plain English text.\nMore of it.\n", "byte 0xff at offset 0", "UTF-16"),
        ("utf-16-le", "Plain English text.\n" * 9, "It looks like UTF-16LE", "UTF-16LE"),
        ("utf-32-be", "Plain English text.\n" * 9, "It looks like UTF-32BE", "UTF-32BE"),
        ("cp1252", "Über.\nLe café est prêt\nFin.", "byte 0xdc at offset 0", "CP1252"),
        ("latin1", "Käfer fliegen über das Land.", "byte 0xe4 at offset 1", "CP1252"),
    ],
)
def test_the_command_that_converts_a_file_is_named(tmp_path, encoding, content, what, named):
    path = tmp_path / "my note.txt"
    path.write_bytes(content.encode(encoding))
    (row,) = rows_of(path)
    assert isinstance(row, BadRow)
    assert what in row.what
    command = row.fix.partition("`")[2].partition("`")[0]
    new = tmp_path / "my note.utf8.txt"
    assert shlex.split(command) == [
        *("iconv", "-f", named, "-t", "UTF-8", str(path), ">", str(new))
    ]
    assert row.fix.endswith("or skip such documents with --on-bad-row skip.")
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)
        assert [row.text for row in rows_of(new)] == [content]


@pytest.mark.skipif(not (shutil.which("iconv") and shutil.which("gzip")), reason="needs iconv")
def test_the_command_converts_a_compressed_file_too(tmp_path):
    path = tmp_path / "my note.txt.gz"
    path.write_bytes(gzip.compress("Le café est prêt".encode("cp1252")))
    (row,) = rows_of(path)
    subprocess.run(row.fix.partition("`")[2].partition("`")[0], shell=True, check=True)
    assert [one.text for one in rows_of(tmp_path / "my note.utf8.txt")] == ["Le café est prêt"]


def test_a_remote_file_is_converted_once_it_is_downloaded():
    fix = read_row("https://host/texts/a.txt?key=1", b"caf\xe9").fix
    assert "download it and convert it with `iconv -f CP1252 -t UTF-8 a.txt > a.utf8.txt`" in fix


@pytest.mark.parametrize(
    "data",
    [b"caf\xe9 au lait", b"abcdefgh\xe2\x82", b"ab\xed\xa0\x80cd", "é€".encode() * 9 + b"\xc0"],
)
@pytest.mark.parametrize(("name", "start"), [("a.txt", b""), ("a.jsonl", b'{"text": "')])
def test_the_first_byte_that_is_not_utf8_is_named(tmp_path, name, start, data):
    (tmp_path / name).write_bytes(start + data)
    (row,) = rows_of(tmp_path / name)
    with pytest.raises(UnicodeDecodeError) as failed:
        data.decode()
    offset = failed.value.start + len(start)
    assert f"byte 0x{(start + data)[offset]:02x} at offset {offset}" in row.what
    assert (row.reason, "iconv -f CP1252 -t UTF-8" in row.fix) == ("not UTF-8", True)


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (bytes(range(256)) * 20, "Tokens are read with `flatout import`"),
        ("Käfer ".encode("utf-16") * 9, "iconv -f UTF-16 -t UTF-8"),
        ("Käfer ".encode("utf-16-le") * 9, "iconv -f UTF-16LE -t UTF-8"),
        ("Käfer ".encode("utf-32-be") * 9, "iconv -f UTF-32BE -t UTF-8"),
        ("Käfer ".encode("cp1252") * 9, "iconv -f CP1252 -t UTF-8"),
    ],
    ids=["tokens", "UTF-16", "UTF-16LE", "UTF-32BE", "CP1252"],
)
def test_what_is_not_utf8_is_answered_by_its_kind(tmp_path, content, advice):
    (tmp_path / "a.dat").write_bytes(content)
    (row,) = rows_of(tmp_path / "a.dat")
    assert advice in row.fix


def test_token_files_among_texts_are_named(tmp_path):
    (tmp_path / "a.log").write_text("text")
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 20)
    assert [row.what for row in rows_of(f"{tmp_path}/*") if isinstance(row, BadRow)] == [
        "is not UTF-8: byte 0x80 at offset 128. It is a binary file"
    ]
