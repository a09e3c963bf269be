import pytest

from flatout.data.sources import BadRow, Document
from flatout.data.sources import tables as module
from flatout.data.sources.files import files, has_rows


def rows(path, text, **parameters):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (part,) = files(str(path), **parameters)
    assert has_rows(part)
    return list(part.rows())


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.csv", 'id,text\n1,"one, ""two""\nthree"\n\n2,four\n', [2, 5]),
        ("a.CSV", '\ufeff\n"id", text\r\n1,"one, ""two""\nthree"\r\n2,four', [3, 5]),
        ("a.csv", 'id,text\r1,"one, ""two""\nthree"\r\r2,four\r', [2, 5]),
        ("a.csv", 'id,text\r1,"one, ""two""\nthree"\r2,four', [2, 4]),
        ("a.csv", 'id;text\n1;"one, ""two""\nthree"\n2;four\n', [2, 4]),
        ("a.csv", 'id|text\n1|"one, ""two""\nthree"\n2|four\n', [2, 4]),
        ("a.tsv", 'id\ttext\n1\t"one, ""two""\nthree"\n2\tfour\n', [2, 4]),
        ("a.tsv", 'id,text\n1,"one, ""two""\nthree"\n2,four\n', [2, 4]),
    ],
)
def test_a_row_is_a_document_and_the_first_names_the_columns(tmp_path, name, text, lines):
    found = rows(tmp_path / name, text)
    assert [row.text for row in found] == ['one, "two"\nthree', "four"]
    assert [str(row.location) for row in found] == [
        f"{tmp_path / name}, line {line}" for line in lines
    ]


def test_columns_may_be_named_as_fields(tmp_path):
    text = "question,answer\nwhy,because\n"
    (row,) = rows(tmp_path / "a.csv", text, text_field="answer", mask_field="question")
    assert (row.text, row.prompt, row.location) == ("because", "why", f"{tmp_path}/a.csv, line 2")
    (row,) = rows(tmp_path / "a.csv", text)
    assert row.what == "has no field 'text': the first row names the columns"
    assert row.fix == "Did you mean --text-field answer?"


def test_duplicate_column_names_are_rejected(tmp_path):
    (row,) = rows(tmp_path / "a.csv", "text,text\na,b\n")
    assert row.what == "has two columns called 'text'"


def test_a_bad_row_is_named_by_its_line_and_the_next_is_read(tmp_path):
    text = b'id,text\n1,"a\nb"\n2\n3,"c" d\n4,caf\xe9\n5,e\n'
    found = rows(tmp_path / "a.csv", text)
    assert [row.text for row in found if isinstance(row, Document)] == ["a\nb", "e"]
    bad = {
        str(row.location).rpartition(" ")[2]: (row.reason, row.what.partition(":")[0])
        for row in found
        if isinstance(row, BadRow)
    }
    assert bad == {
        "4": ("not CSV", "has 1 columns where the first row has 2"),
        "5": ("not CSV", "is not CSV"),
        "6": ("not UTF-8", "is not UTF-8"),
    }
    assert not any(row.unread_bytes for row in found if isinstance(row, BadRow))
    assert f"offset {text.index(0xE9)}" in next(
        row.what for row in found if isinstance(row, BadRow) and row.reason == "not UTF-8"
    )


def test_an_unclosed_quote_counts_the_rows_it_swallows(tmp_path, monkeypatch):
    (good, bad) = rows(tmp_path / "a.csv", 'id,text\n1,a\n2,"b\n3,c\n4,d\n')
    assert (good.text, str(bad.location), bad.unread_bytes) == (
        "a",
        f"{tmp_path}/a.csv, line 3",
        13,
    )
    monkeypatch.setattr(module, "ROW_BYTES", 100)
    good, bad = rows(tmp_path / "b.csv", "text\nx\n" + "y" * 200 + "\nz\n")
    assert (good.text, bad.what, bad.unread_bytes) == ("x", ", line 3 is longer than 0 MiB", 210)


@pytest.mark.parametrize("text", ['"id,text\n1,a\n', b"id,t\xe9xt\n1,a\n"])
def test_a_first_row_that_cannot_be_read_loses_the_table(tmp_path, text):
    (bad,) = rows(tmp_path / "a.csv", text)
    assert isinstance(bad, BadRow)
    assert bad.unread_bytes == len(text)


def test_an_empty_table_has_no_rows(tmp_path):
    for text in ("", "id,text\n", "\n\n"):
        assert rows(tmp_path / "a.csv", text) == []


def test_long_fields_are_read(tmp_path):
    (row,) = rows(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n")
    assert len(row.text) == 200_000  # the csv module's own limit is less


def test_a_file_without_line_feeds_may_be_longer_than_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROW_BYTES", 40)
    texts = [f"row {number}" for number in range(200)]
    found = rows(tmp_path / "a.csv", "\r".join(["text,id", *(f"{text},1" for text in texts)]))
    assert [row.text for row in found] == texts
    assert [str(row.location).rpartition(" ")[2] for row in found] == [
        str(number) for number in range(2, 202)
    ]
