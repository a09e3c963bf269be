"""A file that is not UTF-8 is a bad row, which names the command that converts it."""

import shlex
import shutil
import subprocess

import pytest

from flatout.data.sources import BadRow, file_reading, read_tasks_of
from flatout.data.sources.files import files
from flatout.data.sources.long import chunks_of

TEXTS = {
    "utf-16": ("Plain English text.\nMore of it.\n", "It looks like UTF-16", "UTF-16"),
    "utf-32": ("Plain English text.\n", "It looks like UTF-32", "UTF-32"),
    "utf-16-le": ("Plain English text.\n" * 9, "It looks like UTF-16LE", "UTF-16LE"),
    "utf-32-be": ("Plain English text.\n" * 9, "It looks like UTF-32BE", "UTF-32BE"),
    "cp1252": ("Über.\nLe café est prêt\nFin.", "it reads 'Le café est prêt'", "CP1252"),
    "latin1": ("Käfer fliegen über das Land.", "As CP1252, it reads 'Käfer fliegen", "CP1252"),
    "cp932": ("これは普通の日本語のテキストです。" * 20, "at offset 0", "ENCODING"),
}


def rows_of(path):
    return [
        row for part in read_tasks_of(files, "files", {"path": str(path)}) for row in part.rows()
    ]


@pytest.mark.parametrize("limit", [1 << 20, 64])
@pytest.mark.parametrize("encoding", sorted(TEXTS))
def test_the_command_that_converts_the_file_is_named(tmp_path, monkeypatch, encoding, limit):
    monkeypatch.setattr(file_reading, "LONG_BYTES", limit)
    text, what, named = TEXTS[encoding]
    path = tmp_path / "my note.txt"
    path.write_bytes(text.encode(encoding))
    (row,) = rows_of(path)
    assert isinstance(row, BadRow)
    assert what in row.what
    command = row.fix.partition("`")[2].partition("`")[0]
    new = tmp_path / "my note.utf8.txt"
    assert shlex.split(command) == [
        *("iconv", "-f", named, "-t", "UTF-8", str(path), ">", str(new)),
    ]
    assert row.fix.endswith("or skip such documents with --on-bad-row skip.")
    if named != "ENCODING" and shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)
        assert ["".join(chunks_of(row.text)) for row in rows_of(new)] == [text]


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.json", "a.csv"], ids=lambda name: name.partition(".")[2]
)
def test_every_kind_of_file_is_answered(tmp_path, name):
    start = {"a.txt": "", "a.jsonl": '{"text": "', "a.json": '[{"text": "', "a.csv": "text\n"}
    (tmp_path / name).write_bytes(start[name].encode() + b"caf\xe9 au lait\n")
    *_, row = rows_of(tmp_path / name)
    assert isinstance(row, BadRow)
    assert f"byte 0xe9 at offset {len(start[name]) + 3}" in row.what
    assert "iconv -f CP1252 -t UTF-8" in row.fix


def test_a_byte_far_into_a_file_is_examined_there(tmp_path):
    text = "plain text. " * 10_000 + "Käfer fliegen über das Land. " * 10
    (tmp_path / "long.txt").write_bytes(text.encode("cp1252"))
    (row,) = rows_of(tmp_path / "long.txt")
    assert "Käfer" in row.what


def test_token_files_among_texts_are_named(tmp_path):
    (tmp_path / "a.log").write_text("text")
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 20)
    assert [row.what for row in rows_of(f"{tmp_path}/*") if isinstance(row, BadRow)] == [
        "is not UTF-8: byte 0x80 at offset 128. It is a binary file"
    ]
