import pickle
import re
import sys
from itertools import chain

import pytest

from flatout.data.sources import Document, LeftOut, files, parquet
from flatout.errors import DataError, MissingPackage
from flatout.storage.remote import connection

pyarrow = pytest.importorskip("pyarrow")
tables = pytest.importorskip("pyarrow.parquet")


def write(path, columns, **options):
    tables.write_table(pyarrow.table(columns), path, **{"row_group_size": 10} | options)
    return path


def rows(path, **parameters):
    return [row for part in files.files(str(path), **parameters) for row in part.rows()]


@pytest.fixture
def numbers(tmp_path):
    """45 rows in five row groups."""
    return write(
        tmp_path / "a.parquet",
        {"id": list(range(45)), "text": [f"row {number}" for number in range(45)]},
    )


@pytest.mark.parametrize("part_bytes", [1, 400, 1 << 20])
def test_row_groups_yield_every_row_once_in_order(numbers, monkeypatch, part_bytes):
    monkeypatch.setattr(files, "PART_BYTES", part_bytes)
    parts = files.files(str(numbers))
    assert len(parts) == {1: 5, 400: 3, 1 << 20: 1}[part_bytes]
    assert [part.fingerprint != "" for part in parts] == [True] + [False] * (len(parts) - 1)
    found = [row for part in pickle.loads(pickle.dumps(parts)) for row in part.rows()]
    assert found == [
        Document(f"row {number}", f"{numbers}, row {number + 1}") for number in range(45)
    ]


def test_only_the_requested_columns_are_read(tmp_path, monkeypatch):
    path = write(
        tmp_path / "a.parquet",
        {"blob": [bytes([n]) * 300_000 for n in range(40)], "text": ["x"] * 40},
        compression="none",
        use_dictionary=False,
    )
    read = []
    opened = parquet.open_bytes

    class Counting:
        def __init__(self, file):
            self._file = file

        def read(self, count=-1):
            read.append(data := self._file.read(count))
            return data

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

    monkeypatch.setattr(parquet, "open_bytes", lambda name: Counting(opened(name)))
    assert len(rows(path)) == 40
    assert sum(map(len, read)) < path.stat().st_size / 20


def test_nested_fields_and_prompts_are_columns_too(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        {
            "d": [{"q": "ask", "a": {"text": "answer"}}, {"q": None, "a": {"text": "x"}}],
            "e.f": ["flat"] * 2,
        },
    )
    assert [
        (row.prompt, row.text) for row in rows(path, text_field="d.a.text", mask_field="d.q")
    ] == [("ask", "answer"), ("", "x")]
    assert [row.text for row in rows(path, text_field="e.f")] == ["flat"] * 2


def test_null_empty_and_other_values_are_named_by_their_rows(tmp_path):
    path = write(
        tmp_path / "a.parquet", {"text": ["a", None, "", "d"], "n": [1, 2, 3, 4], "l": [["x"]] * 4}
    )
    first, null, empty, last = rows(path)
    assert (first.text, last.text) == ("a", "d")
    assert empty == LeftOut("empty document", f"{path}, row 3")
    assert (null.location, null.reason) == (f"{path}, row 2", "'text' is not text")
    assert "but it is null" in str(null.error)
    assert [row.reason for row in rows(path, text_field="n")] == ["'n' is not text"] * 4
    assert "but it is a list" in str(rows(path, text_field="l")[0].error)


def test_bytes_that_are_not_utf8_are_one_bad_row(tmp_path):
    data = pyarrow.array([b"good", b"caf\xe9", b"more"], pyarrow.binary()).view(pyarrow.string())
    path = write(tmp_path / "a.parquet", {"text": data})
    good, bad, more = rows(path)
    assert (good.text, more.text) == ("good", "more")
    assert (bad.reason, bad.location) == ("not UTF-8", f"{path}, row 2")


def test_a_missing_column_is_reported_once_per_file(numbers):
    (bad,) = rows(numbers, text_field="txt")
    assert f"{numbers} has no field 'txt'. Fix: Did you mean --text-field text?" in str(bad.error)
    (bad,) = rows(numbers, mask_field="prompt")
    assert "has no field 'prompt'" in str(bad.error)
    assert "--mask-field text" in str(bad.error)


@pytest.mark.parametrize("sizes", [[0], [2, 0, 3], [0, 1]], ids=str)
def test_an_empty_row_group_has_no_rows(tmp_path, sizes):
    texts = [
        [f"group {group}, row {row}" for row in range(size)] for group, size in enumerate(sizes)
    ]
    schema = pyarrow.schema([("text", pyarrow.string())])
    with tables.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for some in texts:
            writer.write_table(pyarrow.table({"text": some}, schema))
    assert tables.ParquetFile(tmp_path / "a.parquet").num_row_groups == len(sizes)
    assert [row.text for row in rows(tmp_path / "a.parquet")] == [*chain(*texts)]


@pytest.mark.parametrize("kept", [0, 3, 500, -1])
def test_a_truncated_file_is_one_bad_row_and_the_next_is_read(numbers, kept):
    numbers.write_bytes(numbers.read_bytes()[:kept])
    (numbers.parent / "b.txt").write_text("after")
    *before, after = rows(numbers.parent)
    assert after.text == "after"
    assert [row.reason for row in before] == ["cannot be read"]
    assert re.search(
        r"a\.parquet cannot be read: .*\. Fix: Check that the file is complete",
        str(before[0].error),
    )


def test_damage_inside_is_named_by_row_and_other_row_groups_are_read(tmp_path):
    texts = [f"row {number} {number**9}" * 20 for number in range(50)]
    path = write(
        tmp_path / "a.parquet",
        {"text": texts},
        compression="zstd",
        use_dictionary=False,
        write_page_checksum=True,
    )
    column = tables.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 10] ^= 0xFF
    path.write_bytes(data)
    found = rows(path)
    bad = [row for row in found if not isinstance(row, Document)]
    assert [row.text for row in found if isinstance(row, Document)] == texts[:20] + texts[30:]
    assert [(row.reason, row.location) for row in bad] == [
        ("cannot be read", f"{path} after row 20")
    ]
    assert "crc" in str(bad[0].error).lower()


def test_a_remote_file_is_read(numbers, memory):
    memory.pipe("/data/a.parquet", numbers.read_bytes())
    assert [row.text for row in rows("memory://data")] == [f"row {number}" for number in range(45)]
    assert str(rows("memory://data/a.parquet")[1].location) == "memory://data/a.parquet, row 2"


def test_a_failing_server_is_not_a_bad_row(numbers, web, monkeypatch):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    web.files["/a.parquet"] = numbers.read_bytes()
    (part,) = files.files(f"{web.address}/a.parquet")
    web.faults = ["500"] * 5
    with pytest.raises(DataError, match=r"a\.parquet at byte \d.*5 attempts"):
        list(part.rows())


def test_a_missing_package_is_reported_before_anything_is_read(numbers, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        MissingPackage,
        match=r"a\.parquet needs the package pyarrow.*pip install \"flatout\[parquet\]\"",
    ):
        files.files(str(numbers))


def test_few_long_cells_are_held_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", 50_000)
    path = write(
        tmp_path / "a.parquet",
        {"text": [f"{number} " + "x" * 10_000 for number in range(40)]},
        row_group_size=40,
        use_dictionary=False,
    )
    held = []
    rows_of = parquet._rows_of
    monkeypatch.setattr(
        parquet, "_rows_of", lambda batch: held.append(batch.num_rows) or rows_of(batch)
    )
    assert [row.text.split()[0] for row in rows(path)] == [str(number) for number in range(40)]
    assert max(held) <= 5


def test_a_cell_that_is_too_long_is_a_bad_row_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_BYTES", 1 << 20)
    path = write(
        tmp_path / "a.parquet",
        {"text": ["a", "x" * (2 << 20), "b", "y" * (1 << 19)]},
        use_dictionary=False,
    )
    first, bad, *rest = rows(path)
    assert [row.text[:1] for row in (first, *rest)] == ["a", "b", "y"]
    assert (bad.reason, str(bad.location)) == ("too long", f"{path}, row 2")
    assert "is longer than 1 MiB" in str(bad.error)
