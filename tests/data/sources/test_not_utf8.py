"""A file that is not UTF-8 is a bad row, which names the command that converts it."""

import shlex
import shutil
import subprocess

import pytest

from flatout.data.sources import BadRow, file_reading, read_tasks_of
from flatout.data.sources.files import files
from flatout.data.sources.long import chunks_of

TEXTS = {
    "utf-16": ("Plain English text.\nMore of it.\n", "byte 0xff at offset 0", "UTF-16"),
    "utf-16-le": ("Plain English text.\n" * 9, "It looks like UTF-16LE", "UTF-16LE"),
    "utf-32-be": ("Plain English text.\n" * 9, "It looks like UTF-32BE", "UTF-32BE"),
    "cp1252": ("Über.\nLe café est prêt\nFin.", "byte 0xdc at offset 0", "CP1252"),
    "latin1": ("Käfer fliegen über das Land.", "byte 0xe4 at offset 1", "CP1252"),
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
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)
        assert ["".join(chunks_of(row.text)) for row in rows_of(new)] == [text]


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.csv"], ids=lambda name: name.partition(".")[2]
)
def test_every_kind_of_file_is_answered(tmp_path, name):
    start = {"a.txt": "", "a.jsonl": '{"text": "', "a.csv": "text\n"}
    (tmp_path / name).write_bytes(start[name].encode() + b"caf\xe9 au lait\n")
    *_, row = rows_of(tmp_path / name)
    assert isinstance(row, BadRow)
    assert f"byte 0xe9 at offset {len(start[name]) + 3}" in row.what
    assert "iconv -f CP1252 -t UTF-8" in row.fix


def test_token_files_among_texts_are_named(tmp_path):
    (tmp_path / "a.log").write_text("text")
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 20)
    assert [row.what for row in rows_of(f"{tmp_path}/*") if isinstance(row, BadRow)] == [
        "is not UTF-8: byte 0x80 at offset 128. It is a binary file"
    ]
