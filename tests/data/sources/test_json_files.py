import json

import pytest

from flatout.data.sources import BadRow, Document
from flatout.data.sources import json_files as module
from flatout.data.sources.files import files, has_rows


def rows(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (part,) = files(str(path))
    assert has_rows(part)
    return list(part.rows())


ROWS = [{"text": f"café {number}", "more": [1, {"a": "]"}]} for number in range(7)]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        "\ufeff\n " + json.dumps(ROWS, indent=2, ensure_ascii=False) + " \n",
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
    ],
)
def test_arrays_and_sequences_of_objects_are_rows_in_any_layout(tmp_path, monkeypatch, text, chunk):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    found = rows(tmp_path / "a.json", text)
    assert [row.text for row in found] == [row["text"] for row in ROWS]
    assert str(found[2].location) == f"{tmp_path}/a.json, value 3"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("  \n", 0),
        ("[]", 0),
        (" [ ] ", 0),
        ('{"text": "one"}', 1),
        ('{\n "text": "one"\n}\n', 1),
    ],
)
def test_few_rows(tmp_path, text, count):
    assert [row.text for row in rows(tmp_path / "a.json", text)] == ["one"] * count


@pytest.mark.parametrize(
    ("text", "reason", "before"),
    [
        ('[{"text": "a"}, {"text": "b"}', "cannot be read", 2),
        ('[{"text": "a"} {"text": "b"}]', "cannot be read", 1),
        ('[{"text": "a"}, ]', "cannot be read", 1),
        ('[{"text": "a"}] {"text": "b"}', "cannot be read", 1),
        ('{"text": "a"}\nno', "cannot be read", 1),
        ('[{"text": "a"}, ' + "[" * 100_000, "cannot be read", 1),
        ('[{"text": "a"}, {"text": "' + "x" * 2000, "cannot be read", 1),
        (b'[{"text": "a"}, {"text": "\xe9"}]', "not UTF-8", 0),
        ('["a"]', "not an object", 0),
        ("12", "not an object", 0),
        ('{"data": [{"text": "a"}]}', "no field 'text'", 0),
    ],
)
def test_an_unreadable_rest_is_a_bad_row_after_the_readable_rows(
    tmp_path, monkeypatch, text, reason, before
):
    monkeypatch.setattr(module, "ROW_BYTES", 1000)
    monkeypatch.setattr(module, "CHUNK_BYTES", 200)
    *good, bad = rows(tmp_path / "a.json", text)
    assert all(isinstance(row, Document) for row in good)
    assert len(good) == before
    assert isinstance(bad, BadRow)
    assert bad.reason == reason
    assert bad.unread_bytes == (len(text) if reason in ("cannot be read", "not UTF-8") else 0)


def test_numbers_across_a_piece_boundary_are_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 2)
    assert [row.what for row in rows(tmp_path / "a.json", "[1234, 5]")] == [
        "is not a JSON object"
    ] * 2
