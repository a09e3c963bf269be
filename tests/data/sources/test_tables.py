"""Parquet, CSV and Arrow files, read with pyarrow: a row is a document."""

import gzip
import pickle
import re
import tracemalloc

import pytest

from flatout.data.sources import BadRow, Document, files, tables
from flatout.data.sources.fields import Fields
from flatout.errors import DataError
from flatout.storage.remote import connection

pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path, columns, **options):
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, **{"row_group_size": 10} | options)
    elif path.suffix == ".feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, str(path))
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    return path


def rows(path, **parameters):
    return [row for task in files.files(str(path), Fields(**parameters)) for row in task.rows()]


def csv(path, text, /, **parameters):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return rows(path, **parameters)


def shown(found):
    """Return the text of each row, or the number and the reason of one that has none."""
    return [
        row.text
        if isinstance(row, Document)
        else f"{str(row.location).rpartition(' ')[2]}: {row.reason}"
        for row in found
    ]


@pytest.fixture
def numbers(tmp_path):
    """45 rows in five row groups."""
    texts = [f"row {number}" for number in range(45)]
    return write(tmp_path / "a.parquet", {"id": list(range(45)), "text": texts})


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


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_each_kind_of_value_is_read_or_named_by_its_row(tmp_path, name):
    nested = [{"q": "ask", "a": {"text": "answer"}}, {"q": None, "a": {"text": "x"}}] * 2
    columns = {"d": nested, "e.f": ["flat"] * 4, "n": [1, 2, 3, 4], "l": [["x"]] * 4}
    not_utf8 = pyarrow.array([b"good", b"caf\xe9", b"", b"more"], pyarrow.binary())
    columns |= {"text": ["a", None, "", "d"], "bytes": not_utf8.view(pyarrow.string())}
    path = write(tmp_path / name, columns)
    assert shown(rows(path)) == ["a", "2: 'text' is not text", "3: empty document", "d"]
    assert shown(rows(path, text="bytes")) == [
        *("good", "2: not UTF-8", "3: empty document", "more")
    ]
    assert shown(rows(path, text="n"))[0] == "1: 'n' is not text"
    assert "but it is a list" in str(rows(path, text="l")[0].error)
    assert [row.text for row in rows(path, text="e.f")] == ["flat"] * 4
    prompted = rows(path, text="d.a.text", prompt="d.q")
    assert [(row.prompt, row.text) for row in prompted] == [("ask", "answer"), ("", "x")] * 2
    bad, _ = rows(path, text="txt")
    assert f"{path} has no field 'txt'. Fix: Did you mean --text-field text?" in str(bad.error)
    bad, _ = rows(path, prompt="prompt")
    assert "has no field 'prompt'" in str(bad.error)
    assert "--mask-field " in str(bad.error)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "a.csv"])
def test_a_table_without_the_column_counts_all_of_its_rows(tmp_path, name):
    if name == "a.csv":
        first, others = csv(tmp_path / name, "body\n" + "x\n" * 45)
    else:
        first, others = rows(write(tmp_path / name, {"body": ["x"] * 45}))
    assert (first.count, first.location) == (1, f"{tmp_path / name}")
    assert (others.count, others.location) == (44, f"{tmp_path / name}, all other rows")
    assert others.reason == first.reason == "no field 'text'"


def test_only_the_requested_columns_of_parquet_are_read(tmp_path, monkeypatch):
    columns = {"blob": [bytes([n]) * 300_000 for n in range(40)], "text": ["x"] * 40}
    path = write(tmp_path / "a.parquet", columns, compression="none", use_dictionary=False)
    read = []
    opened = tables.open_bytes

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

    monkeypatch.setattr(tables, "open_bytes", lambda name: Counting(opened(name)))
    assert len(rows(path)) == 40
    assert sum(map(len, read)) < path.stat().st_size / 20


@pytest.mark.parametrize("sizes", [[0], [2, 0, 3], [0, 1]], ids=str)
def test_an_empty_row_group_has_no_rows(tmp_path, sizes):
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for size in sizes:
            writer.write_table(pyarrow.table({"text": ["x"] * size}, schema))
    assert len(rows(tmp_path / "a.parquet")) == sum(sizes)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
@pytest.mark.parametrize("kept", [0, 3, 500, -1])
def test_a_truncated_file_is_one_bad_row_and_the_next_is_read(tmp_path, name, kept):
    path = write(tmp_path / name, {"text": [f"row {number}" for number in range(45)]})
    path.write_bytes(path.read_bytes()[:kept])
    (tmp_path / "b.txt").write_text("after")
    *before, after = rows(f"{tmp_path}/*")
    assert after.text == "after"
    bad = [row for row in before if isinstance(row, BadRow)]
    assert [row.reason for row in bad] == ["cannot be read"]
    for row in bad:
        assert re.search(r"cannot be read: .*\. Fix: Check that the file is", str(row.error))


def test_damage_inside_is_named_by_row_and_other_row_groups_are_read(tmp_path):
    texts = [f"row {number} {number**9}" * 20 for number in range(50)]
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    path = write(tmp_path / "a.parquet", {"text": texts}, **options)
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 10] ^= 0xFF
    path.write_bytes(data)
    found = rows(path)
    (bad,) = [row for row in found if not isinstance(row, Document)]
    assert [row.text for row in found if isinstance(row, Document)] == texts[:20] + texts[30:]
    assert (bad.reason, bad.location) == ("cannot be read", f"{path} after row 20")
    assert bad.unread_bytes > 0
    assert "crc" in str(bad.error).lower()


def test_a_remote_file_is_read(numbers, memory):
    memory.pipe("/data/a.parquet", numbers.read_bytes())
    memory.pipe("/b.csv", b"text\none\n")
    assert [row.text for row in rows("memory://data")] == [f"row {number}" for number in range(45)]
    assert str(rows("memory://data/a.parquet")[1].location) == "memory://data/a.parquet, row 2"
    assert shown(rows("memory://b.csv")) == ["one"]


def test_a_failing_server_is_not_a_bad_row(numbers, web, monkeypatch):
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    web.files["/a.parquet"] = numbers.read_bytes()
    (part,) = files.files(f"{web.address}/a.parquet")
    web.faults = ["500"] * 5
    with pytest.raises(DataError, match=r"a\.parquet at byte \d.*5 attempts"):
        list(part.rows())


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_few_long_cells_are_held_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 20)
    texts = [f"{number} " + "x" * (1 << 20) for number in range(40)]
    path = write(tmp_path / name, {"text": texts}, row_group_size=40)
    (task,) = files.files(str(path))
    tracemalloc.start()
    assert [row.text.split()[0] for row in task.rows()] == [str(number) for number in range(40)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_a_cell_that_is_too_long_is_a_bad_row_and_the_others_are_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tables, "ROW_BYTES", 1 << 20)
    path = write(tmp_path / name, {"text": ["a", "x" * (2 << 20), "b", "y" * (1 << 19)]})
    first, bad, *rest = rows(path)
    assert [row.text[:1] for row in (first, *rest)] == ["a", "b", "y"]
    assert (bad.reason, str(bad.location)) == ("too long", f"{path}, row 2")
    assert "is longer than 1 MiB" in str(bad.error)


QUOTED = ['one, "two"\nthree', "four"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", 'id,text\n1,"one, ""two""\nthree"\n\n2,four\n', QUOTED),
        ("a.CSV", '\ufeff\n"id", text\r\n1,"one, ""two""\nthree"\r\n2,four', QUOTED),
        ("a.csv", 'id,text\r1,"one, ""two""\nthree"\r\r2,four\r', QUOTED),
        ("a.csv", 'id;text\n1;"one, ""two""\nthree"\n2;four\n', QUOTED),
        ("a.csv", 'id|text\n1|"one, ""two""\nthree"\n2|four\n', QUOTED),
        ("a.tsv", 'id\ttext\n1\t"one, ""two""\nthree"\n2\tfour\n', QUOTED),
        ("a.tsv", 'id,text\n1,"one, ""two""\nthree"\n2,four\n', QUOTED),
        ("a.csv", 'text\n"two\nlines"\na 5" pipe\nend\n', ["two\nlines", 'a 5" pipe', "end"]),
        ("a.csv", "", []),
        ("a.csv", "\n\n", []),
        ("a.csv", "id,text", []),
        ("a.csv", "id,text\n", []),
        ("a.csv", 'text\nNA\nnull\n""\n7\n', ["NA", "null", "3: empty document", "7"]),
        ("a.csv", "text\n" + "x" * 2_000_000 + "\n", ["x" * 2_000_000]),
        (
            "a.csv",
            b'id,text\n1,"a\nb"\n2\n3,caf\xe9\n4,e\n5,6,7\n8,f\n',
            ["a\nb", "2: not CSV", "3: not UTF-8", "e", "5: not CSV", "f"],
        ),
    ],
)
def test_a_row_of_csv_is_a_document_and_the_first_names_the_columns(tmp_path, name, text, expected):
    assert sorted(shown(csv(tmp_path / name, text))) == sorted(expected)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert sorted(shown(rows(packed))) == sorted(expected)


@pytest.mark.parametrize("rows", ['one\n"open\ntwo\n', 'one,1\ntwo,"open\nthree,3\n'])
def test_a_quote_of_csv_that_is_not_closed_is_a_bad_row(tmp_path, rows):
    """It takes the rest of the file, whether its column is read or not."""
    header = "text,id\n" if "," in rows else "text\n"
    *_, bad = csv(tmp_path / "a.csv", header + rows)
    assert "a quote that is not closed, so its last row takes the rest of the file" in bad.what


def test_rows_of_csv_are_numbered_across_blocks_and_bad_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROW_BYTES", 100)
    lines = [f"{number},x" if number % 7 else f"{number}" for number in range(1, 200)]
    found = csv(tmp_path / "a.csv", "text,id\n" + "\n".join(lines))
    texts = {row.text: str(row.location) for row in found if isinstance(row, Document)}
    assert texts == {
        str(number): f"{tmp_path}/a.csv, row {number}" for number in range(1, 200) if number % 7
    }
    bad = [row for row in found if isinstance(row, BadRow)]
    assert [str(row.location) for row in bad] == [
        f"{tmp_path}/a.csv, row {number}" for number in range(7, 200, 7)
    ]
    assert bad[0].what == "has 1 columns where the first row has 2"
    *_, bad = csv(tmp_path / "b.csv", "text\nx\n" + "y" * 300 + "\nz\n")
    assert (bad.reason, bad.unread_bytes) == ("cannot be read", 310)


def test_columns_of_csv_may_be_named_as_fields(tmp_path):
    text = "question,answer,answer.x\nwhy,because,so\n"
    (row,) = csv(tmp_path / "a.csv", text, text="answer", prompt="question")
    assert (row.text, row.prompt, row.location) == ("because", "why", f"{tmp_path}/a.csv, row 1")
    assert shown(rows(tmp_path / "a.csv", text="answer.x")) == ["so"]
    (row,) = rows(tmp_path / "a.csv")
    assert (row.what, row.fix) == ("has no field 'text'", "Did you mean --text-field answer?")
    (row,) = rows(tmp_path / "a.csv", prompt="x", text="answer")
    assert row.location == f"{tmp_path}/a.csv"
    (row,) = csv(tmp_path / "b.csv", "text,text\na,b\n")
    assert row.what == "cannot be read: two columns are called 'text'"
