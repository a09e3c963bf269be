"""Page sizes are read from their headers before pyarrow decompresses them, for any writer."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.data.sources import BadRow, files, parquet, parquet_pages
from flatout.data.sources.packed import Damaged

pyarrow = pytest.importorskip("pyarrow")
tables = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[3]


def rows(path):
    return [row for part in files.files(str(path)) for row in part.rows()]


def chunk_of(path):
    return tables.ParquetFile(path).metadata.row_group(0).column(0)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize(
    "options",
    [{}, {"data_page_version": "2.0"}, {"use_dictionary": False}, {"write_page_checksum": True}],
    ids=str,
)
def test_the_headers_cover_the_whole_column_for_any_writer(tmp_path, compression, options):
    texts = [f"row {number} " + "word " * (number % 300) for number in range(5_000)]
    tables.write_table(
        pyarrow.table({"text": texts}),
        tmp_path / "a.parquet",
        compression=compression,
        data_page_size=40_000,
        dictionary_pagesize_limit=100_000,
        write_page_index=True,
        **options,
    )
    column = chunk_of(tmp_path / "a.parquet")
    pages = parquet_pages.pages_at(str(tmp_path / "a.parquet"), column)
    assert len(pages) >= 5
    assert sum(page.num_values for page in pages if not page.is_dictionary) == len(texts)
    headers = column.total_compressed_size - sum(page.packed_bytes for page in pages)
    assert sum(page.num_bytes for page in pages) == column.total_uncompressed_size - headers
    assert 0 < headers < 200 * len(pages)
    assert any(page.is_dictionary for page in pages) == column.has_dictionary_page
    assert [row.text for row in rows(tmp_path / "a.parquet")] == texts


def test_a_page_that_decompresses_to_too_much_is_a_bad_row_and_other_files_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(parquet_pages, "PAGE_BYTES", 100_000)
    table = pyarrow.table({"text": ["a" * 200_000]})
    for name, packed in (("bomb", "zstd"), ("plain", "none")):
        path = tmp_path / f"{name}.parquet"
        tables.write_table(table, path, compression=packed, use_dictionary=False)
    bad, document = rows(tmp_path)
    assert isinstance(bad, BadRow)
    assert "bomb.parquet has a page of 0.00 MB that decompresses to 0 MB" in str(bad.error)
    assert bad.unread_bytes >= 200_000
    assert len(document.text) == 200_000


@pytest.fixture
def taken(monkeypatch):
    """The number of rows in each batch."""
    counts = []
    rows_of = parquet._rows_of
    monkeypatch.setattr(
        parquet, "_rows_of", lambda batch: counts.append(batch.num_rows) or rows_of(batch)
    )
    return counts


def test_rows_that_share_a_long_value_are_read_in_small_batches(tmp_path, monkeypatch, taken):
    monkeypatch.setattr(parquet_pages, "PAGE_BYTES", 400_000)
    tables.write_table(
        pyarrow.table({"text": ["a" * 100_000] * 50}), tmp_path / "a.parquet", compression="zstd"
    )
    assert [len(row.text) for row in rows(tmp_path / "a.parquet")] == [100_000] * 50
    assert max(taken) == 3


def test_rows_of_ordinary_files_are_read_in_large_batches(tmp_path, taken):
    texts = [f"row {number}" for number in range(1_000)]
    tables.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    rows(tmp_path / "a.parquet")
    assert taken == [256, 256, 256, 232]


class Column:
    data_page_offset, total_compressed_size = 0, 60
    has_dictionary_page, dictionary_page_offset = False, None


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 60,
        b"\x1b" * 60,
        b"\xff" * 60,
        b"\x1c" * 60,
        b"\x15\x00\x15\x01\x15\x02\x00" * 9,
        b"",
        b"\x18" + b"\xff" * 9 + b"\x7f",
    ],
)
def test_bytes_that_are_not_a_header_are_an_error_not_a_loop(data):
    with pytest.raises((Damaged, EOFError)):
        list(parquet_pages._pages_of(io.BytesIO(data), Column))


BOMBS = r"""
import sys, pyarrow, pyarrow.parquet as tables
table = pyarrow.table({"text": ["a" * 8_000_000] * 100})
rows, page = sys.argv[1] + "/rows.parquet", sys.argv[1] + "/page.parquet"
tables.write_table(table, rows, compression="zstd", dictionary_pagesize_limit=1 << 30)
table = pyarrow.table({"text": ["a" * 600_000_000]})
tables.write_table(table, page, compression="zstd", use_dictionary=False)
"""
PEAK = r"""
import re, sys
from pathlib import Path
from flatout.data.sources import Document
from flatout.data.sources.files import files
rows = (row for task in files(sys.argv[1]) for row in task.rows())
print(*(row.what for row in rows if not isinstance(row, Document)))
print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


@pytest.mark.faults
def test_a_small_file_takes_little_memory_whatever_it_decompresses_to(tmp_path):
    def run(program):
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    run(BOMBS)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100_000
    message, peak_mib = run(PEAK)
    assert "that decompresses to 600 MB" in message
    assert int(peak_mib) < 500
