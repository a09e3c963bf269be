import gzip
import json
import re
from pathlib import Path

import pytest

from flatout.data import sources
from flatout.data.sources import BadRow, Document, LeftOut, files
from flatout.data.sources.fields import Fields
from flatout.data.sources.listing import shared_file
from flatout.data.sources.packed import NotHandedOut
from flatout.errors import DataError


def rows(path, **parameters):
    include = parameters.pop("include", ())
    tasks = files.files(str(path), Fields(**parameters), include)
    return [row for task in tasks for row in task.rows()]


def texts(path, **parameters):
    return [row.text for row in rows(path, **parameters)]


def write_rows(path: Path, values) -> Path:
    path.write_text(
        "".join(json.dumps({"text": value}) + "\n" for value in values), encoding="utf-8"
    )
    return path


def test_a_text_file_is_one_document_to_the_byte(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("one\r\ntwo\n\nthrée\x00".encode())
    assert texts(path) == ["one\r\ntwo\n\nthrée\x00"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfone")
    assert texts(path) == ["one"]
    write_rows(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes())
    assert texts(tmp_path / "b.jsonl") == ["x"]


def test_a_directory_is_read_recursively_in_sorted_order(tmp_path):
    names = "b.txt a/z.md a/b/c.rst rows.jsonl .hidden/x.txt .secret.txt picture.png"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "row"}' if name.endswith("jsonl") else name)
    left_out, *documents = rows(tmp_path)
    assert [row.text for row in documents] == ["a/b/c.rst", "a/z.md", "b.txt", "row"]
    assert left_out == LeftOut(".png file", str(tmp_path / "picture.png"))


def test_skipped_files_of_a_directory_are_counted_by_suffix_and_change_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (before,) = files.files(str(tmp_path))
    for number in range(25):
        (tmp_path / f"{number:02d}.HTML").write_text("<p>page")
    for name in ("x.py", "y.py.gz", "z.tar.GZ", "Makefile"):
        (tmp_path / name).write_text(name)
    (part,) = files.files(str(tmp_path))
    assert (part.fingerprint, part.num_bytes, part.files) == (
        before.fingerprint,
        before.num_bytes,
        before.files,
    )
    left_out = [row for row in part.rows() if isinstance(row, LeftOut)]
    assert list(left_out) == list(part.skipped)
    others = ["file without an ending", ".py file", ".py.gz file", ".tar.gz file"]
    assert [row.reason for row in left_out] == [".html file"] * 10 + others
    assert sum(row.count for row in left_out) == 29
    (tmp_path / "y.py.gz").write_bytes(gzip.compress(b"y"))
    found = rows(tmp_path, include=["*.py"])
    assert [row.text for row in found if isinstance(row, Document)] == ["a", "x.py", "y"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a.ipynb", "jupyter nbconvert"),
        ("a.rtf", "pandoc"),
        ("a.RTF", "pandoc"),
        ("a.pdf", "pdftotext"),
        ("a.docx", "pandoc"),
        ("a.html", "trafilatura < FILE.html > FILE.txt`"),
        ("a.json", "jq -c '.[]' FILE.json > FILE.jsonl`"),
    ],
)
def test_documents_of_other_programs_are_rejected_with_a_command_that_converts_them(
    tmp_path, name, command
):
    (tmp_path / name).write_text('{"cells": []}')
    (tmp_path / "b.log").write_text("text")
    bad, text = rows(f"{tmp_path}/*")
    what = (
        rf"{name} is (an? )?.*, not text\. Fix: Convert it, for example with `{re.escape(command)}"
    )
    assert re.search(what, str(bad.error))
    assert text.text == "text"


def test_a_glob_takes_any_file_it_matches(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    assert texts(tmp_path / "**" / "*.py") == ["a", "b"]
    with pytest.raises(DataError, match="No file matches"):
        texts(tmp_path / "*.c")
    (tmp_path / "sets [v2]").mkdir()
    (tmp_path / "sets [v2]" / "c.txt").write_text("c")
    with pytest.raises(DataError, match=r"write \[\[\]v2\] for a name with brackets"):
        texts(tmp_path / "sets [v2]" / "*.txt")
    assert texts(tmp_path / "sets [[]v2]" / "*.txt") == ["c"]


def test_rows_before_a_fault_are_kept_and_the_next_file_is_read(tmp_path):
    lines = "".join(f'{{"text": "row {number} {number**9}"}}\n' for number in range(5000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-5000])
    (tmp_path / "b.txt").write_text("after")
    *before, bad, after = rows(tmp_path)
    assert len(before) > 3000
    assert [row.text for row in before] == [
        f"row {number} {number**9}" for number in range(len(before))
    ]
    assert (bad.reason, after.text) == ("cannot be read", "after")


def test_an_empty_file_is_omitted_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b")
    assert rows(tmp_path) == [
        LeftOut("empty document", str(tmp_path / "a.txt")),
        Document("b", str(tmp_path / "b.txt")),
    ]


@pytest.mark.parametrize("step", [1, 2, 7, 16, 17, 50, 1000])
def test_rows_split_into_tasks_are_each_read_once(tmp_path, monkeypatch, step):
    values = ["", "a", "é" * 30, "line\nbreak", "x" * 100, "end"]
    path = write_rows(tmp_path / "rows.jsonl", values)
    monkeypatch.setattr(files, "PART_BYTES", step)
    parts = files.files(str(path))
    assert len(parts) == -(-path.stat().st_size // step)
    found = [row for part in parts for row in part.rows() if isinstance(row, Document)]
    assert [row.text for row in found] == values[1:]
    assert [str(row.location) for row in found] == [f"{path}, line {n}" for n in range(2, 7)]


def test_small_files_share_a_task_and_short_text_is_never_split(tmp_path, monkeypatch):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    (tmp_path / "g.txt").write_text("g" * 100)
    monkeypatch.setattr(files, "PART_BYTES", 30)
    parts = files.files(str(tmp_path))
    assert [part.num_bytes for part in parts] == [30, 30, 100]
    assert "".join(row.text for row in parts[2].rows()) == "g" * 100


def test_a_row_that_is_not_utf8_names_line_and_byte(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "c"}\n')
    good, bad, after = rows(path)
    assert (good.text, after.text) == ("a", "c")
    assert f"{path}, line 2" in str(bad.error)
    assert "offset 24" in str(bad.error)


@pytest.mark.parametrize(
    ("line", "reason", "said"),
    [
        ('{"text": "a"', "not JSON", "is not JSON"),
        ("[" * 100_000, "not JSON", "nested too deeply"),
        ('{"text": 7}', "'text' is not text", "but it is a number"),
        ('{"txt": "a"}', "no field 'text'", "--text-field txt"),
    ],
)
def test_a_bad_row_names_its_line_and_the_next_is_still_read(tmp_path, line, reason, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n{{"text": "c"}}\n')
    _, bad, after = rows(path)
    assert after.text == "c"
    assert bad.reason == reason
    assert said in str(bad.error)
    assert str(bad.location) == f"{path}, line 2"


@pytest.mark.parametrize("step", [7, 40, 1 << 20])
def test_lines_are_counted_only_for_the_bad_rows_that_are_shown(tmp_path, monkeypatch, step):
    monkeypatch.setattr(files, "PART_BYTES", step)
    counts = []
    count = sources.line_number
    monkeypatch.setattr(
        sources, "line_number", lambda *place: counts.append(place) or count(*place)
    )
    path = tmp_path / "a.jsonl"
    path.write_text('bad\n\n{"text": "x"}\n' * 30)
    assert [str(row.location) for row in rows(path) if isinstance(row, BadRow)] == [
        f"{path}, line {line}" for line in range(1, 91, 3)
    ]
    assert len(counts) == 30
    assert len(rows(path)) == 60
    assert len(counts) == 30


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_file_that_the_system_rejects_is_not_a_bad_row(tmp_path, name):
    write_rows(tmp_path / name, ["x"])
    (part,) = files.files(str(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(NotHandedOut, match=rf"{name} cannot be read: No such file"):
        list(part.rows())


def test_the_fingerprint_depends_on_the_content_not_the_path_or_the_tasks(tmp_path, monkeypatch):
    def mark(path):
        return "\n".join(part.fingerprint for part in files.files(str(path)) if part.fingerprint)

    first = write_rows(tmp_path / "rows.jsonl", ["a" * 50, "b" * 50])
    (tmp_path / "else").mkdir()
    same = write_rows(tmp_path / "else" / "rows.jsonl", ["a" * 50, "b" * 50])
    before = mark(first)
    assert mark(same) == before
    monkeypatch.setattr(files, "PART_BYTES", 20)
    assert mark(first) == before
    write_rows(same, ["a" * 50, "b" * 49 + "c"])
    assert mark(same) != before


def test_a_large_file_is_fingerprinted_by_blocks_from_end_to_end(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100_000))
    before = files.fingerprint(path, 100_000, 16_000)
    for place in (0, 99_999):
        data = bytearray(100_000)
        data[place] = 1
        path.write_bytes(data)
        assert files.fingerprint(path, 100_000, 16_000) != before


def test_a_copy_is_found_by_its_content(tmp_path):
    texts = {"a": "x" * 50, "b": "x" * 49 + "y", "c": "x" * 51, "empty": "", "none": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "copy.txt").write_text(texts["b"])
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")

    def listed(*names):
        return [
            file
            for name in names
            for task in files.files(str(tmp_path / f"{name}.txt"))
            for file in task.files
        ]

    assert shared_file(listed("a", "empty"), listed("b", "c", "none")) is None
    for some, others in ((("a", "b"), ("c", "copy")), (("a",), ("link",)), (("c",), ("b", "c"))):
        assert shared_file(listed(*some), listed(*others)) == str(tmp_path / f"{others[-1]}.txt")


def test_a_local_file_may_be_named_by_url(tmp_path):
    (tmp_path / "a b.txt").write_text("here")
    assert texts((tmp_path / "a b.txt").as_uri()) == ["here"]


def test_a_prompt_is_a_field_of_rows(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"prompt": "2 + 2 =", "text": " 4"}\n')
    assert [(row.prompt, row.text) for row in rows(tmp_path, prompt="prompt")] == [
        ("", "text"),
        ("2 + 2 =", " 4"),
    ]
