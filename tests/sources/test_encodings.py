import gzip
import shutil
import subprocess

import pytest

from flatout.data.pack import Job
from flatout.sources import BadRow, parts_of
from flatout.sources.encodings import encoding_of
from flatout.sources.files import files

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
    (row,) = [row for part in parts_of(files, "files", {"path": str(path)}) for row in Job(part).rows()]
    assert isinstance(row, BadRow)
    return row


@pytest.mark.parametrize("encoding", sorted(TEXTS))
@pytest.mark.parametrize("name", ["note.txt", "a note.txt"])
def test_the_encoding_is_named_with_a_command_that_converts_the_file(tmp_path, encoding, name):
    text, called = TEXTS[encoding]
    (tmp_path / name).write_bytes(text.encode(encoding))
    row = bad_row(tmp_path / name)
    assert f"it looks like {called}" in row.what
    if shutil.which("iconv") is None:
        pytest.skip("iconv is not installed")
    subprocess.run(["bash", "-c", row.fix.split("`")[1]], check=True, cwd=tmp_path)
    converted = tmp_path / name.replace(".txt", ".utf8.txt")
    assert converted.read_text(encoding="utf-8-sig").removeprefix("\ufeff") == text.removeprefix("\ufeff")


def test_a_byte_far_into_a_file_is_looked_at_where_it_is(tmp_path):
    text = "plain text. " * 10_000 + "Käfer fliegen über das Land. " * 10
    (tmp_path / "long.txt").write_bytes(text.encode("cp1252"))
    assert encoding_of(str(tmp_path / "long.txt"), 120_001) == "CP1252"


def test_packed_text_is_to_be_unpacked_first(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("Käfer fliegen über das Land. ".encode("cp1252") * 20))
    row = bad_row(tmp_path / "a.txt.gz")
    assert "it looks like CP1252" in row.what
    assert row.fix.startswith("Unpack it, convert it with `iconv -f CP1252")


def test_what_is_no_text_is_not_converted(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 20)
    row = bad_row(tmp_path / "a.txt")
    assert "it looks like a binary file" in row.what
    assert "iconv" not in row.fix


def test_tokens_among_texts_are_named(tmp_path):
    (tmp_path / "a.log").write_text("text")
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 20)
    rows = [row for part in parts_of(files, "files", {"path": f"{tmp_path}/*"}) for row in Job(part).rows()]
    assert [row.what for row in rows if isinstance(row, BadRow)] == ["is not UTF-8: byte 0x80 at offset 128; it is a binary file"]
