import gzip
import json

import pytest

from flatout.data.sources import BadRow, Document, file_reading, read_tasks_of
from flatout.data.sources import files as files_module
from flatout.data.sources.encodings import codec_of, encoding_of
from flatout.data.sources.files import files
from flatout.data.sources.long import LongText, chunks_of
from flatout.errors import DataError

TEXTS = {
    "utf-16": ("Plain English text.\nMore of it.\n", "UTF-16"),
    "utf-16-be": ("\ufeffPlain English text.\n", "UTF-16"),
    "utf-32": ("Plain English text.\n", "UTF-32"),
    "utf-32-be": ("\ufeffPlain English text.\n", "UTF-32"),
    "cp1252": ("Le café était à côté de l’hôtel – “très” élégant. " * 20, "CP1252"),
    "latin1": ("Käfer fliegen über das Land. " * 20, "CP1252"),
    "cp1251": ("Привет мир, это обычный русский текст. " * 20, "CP1251"),
    "koi8_r": ("Привет мир, это обычный русский текст. " * 20, "KOI8-R"),
    "cp932": ("これは普通の日本語のテキストです。" * 20, "CP932"),
    "gb18030": ("这是一个普通的中文文本。" * 20, "GB18030"),
}


def bad_row(path):
    (row,) = [
        row for part in read_tasks_of(files, "files", {"path": str(path)}) for row in part.rows()
    ]
    assert isinstance(row, BadRow)
    return row


def documents(path, encoding):
    rows = [row for part in files(str(path), encoding=codec_of(encoding)) for row in part.rows()]
    assert all(isinstance(row, Document) for row in rows), rows
    return rows


def texts(path, encoding):
    return ["".join(chunks_of(row.text)) for row in documents(path, encoding)]


@pytest.mark.parametrize("encoding", sorted(TEXTS))
def test_the_encoding_is_named_with_the_option_that_reads_the_file(tmp_path, encoding):
    text, called = TEXTS[encoding]
    (tmp_path / "note.txt").write_bytes(text.encode(encoding))
    row = bad_row(tmp_path / "note.txt")
    assert f"It looks like {called}" in row.what
    assert row.fix.startswith(f"Add --encoding {called}, or")
    assert texts(tmp_path / "note.txt", called) == [text.removeprefix("\ufeff")]


def test_the_guess_shows_how_the_text_reads_in_it(tmp_path):
    (tmp_path / "note.txt").write_bytes("Über alles.\nLe café est prêt\nFin.".encode("cp1252"))
    assert bad_row(tmp_path / "note.txt").what.endswith(
        "It looks like CP1252, in which it reads 'Le café est prêt'"
    )


def test_a_codec_that_is_not_for_text_is_not_suggested():
    with pytest.raises(DataError, match="'rot13' is not a text encoding") as refused:
        codec_of("rot13")
    assert "Did you mean rot13" not in refused.value.fix


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("limit", [1 << 20, 64])
def test_ascii_as_utf_16_or_32_without_a_mark_is_not_read_as_utf_8(
    tmp_path, monkeypatch, encoding, limit
):
    monkeypatch.setattr(file_reading, "LONG_BYTES", limit)
    called = f"{encoding[:6]}{encoding[7:]}".upper()
    (tmp_path / "note.txt").write_bytes(("Plain English text.\n" * 9).encode(encoding))
    row = bad_row(tmp_path / "note.txt")
    assert f"It looks like {called}" in row.what
    assert texts(tmp_path / "note.txt", called) == ["Plain English text.\n" * 9]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be", "cp1252", "gb18030", "iso2022_jp"])
def test_all_kinds_of_files_are_read_in_the_encoding(tmp_path, monkeypatch, encoding):
    word = "日本" if encoding in ("gb18030", "iso2022_jp") else "café"
    values = [f"{number} {word}" for number in range(9)]
    written = {
        "a.jsonl": "".join(
            json.dumps({"text": value}, ensure_ascii=False) + "\n" for value in values
        ),
        "a.json": json.dumps([{"text": value} for value in values], ensure_ascii=False),
        "a.csv": "id,text\n" + "".join(f'1,"{value}"\n' for value in values),
    }
    monkeypatch.setattr(files_module, "PART_BYTES", 16)
    for name, text in written.items():
        (tmp_path / name).write_bytes(text.encode(encoding))
        assert texts(tmp_path / name, encoding) == values
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode(encoding)))
        assert texts(tmp_path / f"{name}.gz", encoding) == values
    assert [str(row.location) for row in documents(tmp_path / "a.jsonl", encoding)][
        -1
    ] == f"{tmp_path}/a.jsonl, line 9"
    long = f"{word}\r\n" * 60_000
    monkeypatch.setattr(file_reading, "LONG_BYTES", 1000)
    (tmp_path / "long.txt").write_bytes(long.encode(encoding))
    (document,) = documents(tmp_path / "long.txt", encoding)
    assert isinstance(document.text, LongText)
    assert "".join(document.text[10:100_000].chunks()) == long[10:100_000]


def test_a_utf8_file_among_others_is_not_converted(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("cp1252"))
    (tmp_path / "b.txt").write_bytes("café".encode())
    (tmp_path / "c.txt").write_bytes(b"plain")
    assert texts(tmp_path, "cp1252") == ["café", "café", "plain"]
    (tmp_path / "d.txt").write_bytes("plain".encode("utf-16-le"))
    assert texts(tmp_path / "d.txt", "utf-16-le") == ["plain"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
def test_text_that_is_not_in_the_encoding_is_a_bad_row(tmp_path, name):
    start = {"a.txt": "", "a.jsonl": '{"text": "', "a.json": '[{"text": "', "a.csv": "text\n"}[
        name
    ].encode()
    (tmp_path / name).write_bytes(start + b"caf\xe9 \x81")
    *_, row = [
        row for part in files(str(tmp_path / name), encoding="cp1252") for row in part.rows()
    ]
    assert isinstance(row, BadRow)
    assert row.what == f"is not cp1252: byte 0x81 at offset {len(start) + 5}"
    assert row.reason == "not in the encoding"
    assert bool(row.unread_bytes) == (name != "a.txt")
    (tmp_path / "cut.txt").write_bytes("text".encode("utf-16")[:-1])
    (row,) = [
        row for part in files(str(tmp_path / "cut.txt"), encoding="utf-16") for row in part.rows()
    ]
    assert row.what == "is not utf-16: byte 0x74 at offset 8"


def test_an_unknown_encoding_is_rejected(parquet, tmp_path):
    assert [
        codec_of(name) for name in (None, "UTF-8", "utf8", "UTF-8-SIG", "CP1252", "Latin-1")
    ] == [None] * 4 + ["cp1252", "iso8859-1"]
    with pytest.raises(
        DataError, match=r"--encoding 'cp1253x' is not a text encoding .* Did you mean cp1253\?"
    ):
        codec_of("cp1253x")
    for name in ("base64", "rot13", "", "a\0"):
        with pytest.raises(DataError, match="is not a text encoding that Python knows"):
            codec_of(name)
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["a"]}))
    with pytest.raises(
        DataError, match=r"text in Parquet is always UTF-8\. Fix: Remove --encoding"
    ):
        files(str(tmp_path / "a.parquet"), encoding="cp1252")


def test_a_byte_far_into_a_file_is_examined_there(tmp_path):
    text = "plain text. " * 10_000 + "Käfer fliegen über das Land. " * 10
    (tmp_path / "long.txt").write_bytes(text.encode("cp1252"))
    assert encoding_of(str(tmp_path / "long.txt"), 120_001) == "CP1252"


def test_token_files_among_texts_are_named(tmp_path):
    (tmp_path / "a.log").write_text("text")
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 20)
    rows = [
        row
        for part in read_tasks_of(files, "files", {"path": f"{tmp_path}/*"})
        for row in part.rows()
    ]
    assert [row.what for row in rows if isinstance(row, BadRow)] == [
        "is not UTF-8: byte 0x80 at offset 128. It is a binary file"
    ]
