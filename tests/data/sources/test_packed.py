import bz2
import contextlib
import gc
import gzip
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from flatout.data.sources import files
from flatout.data.sources.packed import open_bytes
from flatout.errors import MissingPackage

ROOT = Path(__file__).parents[3]
TEXT = "packed: größer 日本\n" * 20_000
ROWS = '{"text": "one"}\n\n{"text": "two"}\n{"txt": 3}\n'


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


def rows(path):
    return [row for part in files.files(str(path)) for row in part.rows()]


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_text_and_rows_read_as_if_decompressed(tmp_path, ending):
    (tmp_path / f"a.txt{ending}").write_bytes(PACKERS[ending](TEXT.encode()))
    (tmp_path / f"b.jsonl{ending.upper()}").write_bytes(PACKERS[ending](ROWS.encode()))
    text, one, two, bad = rows(tmp_path)
    assert (text.text, one.text, two.text) == (TEXT, "one", "two")
    assert str(two.location) == f"{tmp_path}/b.jsonl{ending.upper()}, line 3"
    assert str(bad.location).endswith("line 4")


@pytest.mark.parametrize("ending", PACKERS)
def test_concatenated_compressed_files_are_one_file(tmp_path, ending):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(
        b"".join(PACKERS[ending](piece) for piece in (b"one ", b"", b"two ", b"x" * 200_000))
    )
    with open_bytes(str(path)) as file:
        assert file.read() == b"one two " + b"x" * 200_000


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("kept", [0.2, 0.9, 0.999])
def test_a_truncated_file_is_named(tmp_path, ending, kept):
    path = tmp_path / f"a.txt{ending}"
    packed = PACKERS[ending](bytes(range(256)) * 40)
    path.write_bytes(packed[: min(int(kept * len(packed)), len(packed) - 1)])
    (bad,) = rows(path)
    assert re.search(
        rf"a\.txt{ending} cannot be read: .*\. Fix: Check that the file is complete", str(bad.error)
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACKERS)
def test_a_file_that_cannot_be_opened_leaves_no_reader_behind(tmp_path, ending):
    """Python reports an object that cannot be finalised only in development mode."""
    if ending == ".zst":
        pytest.importorskip("zstandard")
    program = (
        "import sys\nfrom flatout.data.sources.packed import open_bytes\n"
        "try: open_bytes(sys.argv[1])\nexcept FileNotFoundError: print('none')"
    )
    words = [sys.executable, "-X", "dev", "-c", program, str(tmp_path / f"no{ending}")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "none\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACKERS)
def test_a_damaged_file_is_closed(tmp_path, ending):
    if ending == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"a.jsonl{ending}"
    path.write_text(ROWS)
    assert [row.reason for row in rows(path)] == ["cannot be read"]
    gc.collect()
    assert path not in open_files()


def open_files():
    """Return this process's open files; files that close during the search are ignored."""
    found = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(handle.readlink())
    return found


def test_a_missing_package_is_reported_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(b"")
    with pytest.raises(
        MissingPackage,
        match=r"a\.txt\.zst needs the package zstandard.*Fix: .*pip install \"flatout\[zstd\]\"",
    ):
        files.files(str(tmp_path))
    (tmp_path / "a.txt.zst").rename(tmp_path / "a.txt")
    assert files.files(str(tmp_path))


def test_a_small_file_that_decompresses_to_much_takes_little_memory(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstd(bytes(1 << 28)))
    assert (tmp_path / "a.txt.zst").stat().st_size < 10_000
    tracemalloc.start()
    try:
        with open_bytes(str(tmp_path / "a.txt.zst")) as file:
            size = sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 1 << 28
    assert peak < 100 << 20
