import bz2
import gzip
import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.data.prepare.request.standard_input import spool_standard_input
from flatout.errors import DataError
from flatout.progress import SILENT

ROOT = Path(__file__).parents[3]
ROWS = b'{"text": "one"}\n'


@pytest.fixture
def spooled(tmp_path, monkeypatch):
    """Return a function that saves bytes from standard input."""

    def spool(data, **options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return spool_standard_input(tmp_path, **options)

    return spool


@pytest.mark.parametrize(
    ("data", "ending"),
    [
        (b"", ".txt"),
        (b"plain", ".txt"),
        (ROWS, ".jsonl"),
        (b"\xef\xbb\xbf\n  \t" + ROWS, ".jsonl"),
        (gzip.compress(ROWS), ".jsonl.gz"),
        (gzip.compress(b"plain"), ".txt.gz"),
        (gzip.compress(ROWS)[:9], ".txt.gz"),
        (bz2.compress(ROWS), ".jsonl.bz2"),
        (b"PAR1....PAR1", ".parquet"),
        (b'[\n {"text": "one"}]', ".json"),
        (b"[Chapter 1]", ".txt"),
        (b"<!DOCTYPE html>\n<p>one", ".html"),
        (b'<?xml version="1.0"?>\n<html>', ".html"),
        (b"<htmlish>", ".txt"),
    ],
)
def test_the_suffix_follows_from_the_first_bytes(tmp_path, spooled, data, ending):
    said = []

    class Listener(type(SILENT)):
        say = staticmethod(said.append)

    path, sha256 = spooled(data, progress=Listener())
    assert path.read_bytes() == data
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert path.name.startswith(".stdin-")
    assert "".join(path.suffixes) == ending
    assert list(tmp_path.iterdir()) == [path]
    assert said == [f"Standard input: {len(data):,} bytes, read as a {ending} file."]


def test_the_file_is_removed_when_the_process_ends(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from flatout.data.prepare.request.standard_input import spool_standard_input\n"
    )
    program += "print(spool_standard_input(Path(sys.argv[1]))[0].read_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        input=ROWS,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.decode().strip() == repr(ROWS)
    assert list(tmp_path.iterdir()) == []


def test_files_of_killed_processes_are_removed_and_others_stay(tmp_path, spooled):
    (tmp_path / ".stdin-killed.jsonl").write_bytes(ROWS)
    used, _ = spooled(ROWS)
    path, _ = spooled(b"plain")
    assert sorted(tmp_path.iterdir()) == sorted([used, path])


def test_a_full_disk_is_reported_and_nothing_stays(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def read(self, count=-1):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Full()))
    with pytest.raises(
        DataError, match=r"Cannot save standard input in .*: No space left on device.*Free space"
    ):
        spool_standard_input(tmp_path)
    assert list(tmp_path.iterdir()) == []
