import io
import os
from pathlib import Path

import fsspec
import pytest
from corpora import TEXT, open_corpus, texts

from flatout.data.prepare.request.inputs import in_both_splits
from flatout.errors import DataError


def type_in(monkeypatch, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_any_text_but_a_card_can_be_validation_text(cards, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    type_in(monkeypatch, b"typed")
    corpus = open_corpus(
        [str(tmp_path / "a.txt")],
        val=["-", str(tmp_path / "b.txt"), "generated:words:documents=1"],
        spool=tmp_path,
    )
    assert texts(corpus.validation)[:2] == ["typed", "b"]
    assert corpus.all_read_tasks == (*corpus.validation.read_tasks, *corpus.read_tasks)
    assert len(corpus.all_read_tasks) == 4
    assert corpus.fingerprint == open_corpus([str(tmp_path / "a.txt")]).fingerprint
    with pytest.raises(DataError, match="--val play is a dataset card"):
        open_corpus([str(tmp_path / "a.txt")], val=["play"])
    with pytest.raises(DataError, match="Standard input is named twice"):
        open_corpus(["-"], val=["-"])


def test_text_in_both_splits_is_found_by_content_or_fingerprint(tmp_path):
    for name, text in (
        ("rows/a.txt", "one"),
        ("rows/b.txt", "two"),
        ("rows/c.txt", ""),
        ("d.txt", "two"),
        ("e.txt", "six"),
        ("f.txt", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def shared(name, *val):
        return in_both_splits(open_corpus([name], val=val))

    folder = str(tmp_path / "rows")
    d, e, f = (str(tmp_path / f"{name}.txt") for name in "def")
    assert shared(folder) is None
    assert shared(folder, e, f) is None
    assert shared(folder, e, d) == d
    assert shared(folder, f"{folder}/a.txt") == f"{folder}/a.txt"
    words = "generated:words:documents=5"
    assert shared(words, f"{words},seed=1") is None
    assert words.rpartition(":")[0] in shared(words, words)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/both/a.txt", b"one")
    memory.pipe_file("/both/b.txt", b"two")
    try:
        assert shared("memory://both/a.txt", "memory://both/b.txt") is None
        assert shared("memory://both/*.txt", "memory://both/a*").endswith("both/a.txt")
    finally:
        memory.rm("/both", recursive=True)


def test_sources_are_packed_in_the_order_named(cards, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    corpus = open_corpus([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    other = open_corpus([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert texts(corpus) == ["b", "a"]
    assert corpus.split is None
    assert corpus.fingerprint != other.fingerprint


def test_a_name_that_is_not_utf8_has_a_fingerprint(tmp_path):
    (tmp_path / os.fsdecode(b"b\xfc.txt")).write_text("text")
    assert len(open_corpus([str(tmp_path)]).fingerprint) == 64


def test_the_mtime_digest_changes_with_sizes_and_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(name)
        os.utime(name, (5, 5))

    def digest(*names, **options):
        return open_corpus(names, **options).mtime_digest

    first = digest("a.txt", val=["b.txt"])
    assert first == digest("a.txt", val=["b.txt"]) == digest("./a.txt", "b.txt")
    os.utime("b.txt", (5, 6))
    assert len({first, digest("a.txt", val=["b.txt"]), digest("a.txt")}) == 3
    Path("b.txt").write_text("longer")
    os.utime("b.txt", (5, 5))
    assert digest("a.txt", "b.txt") != first


def test_text_with_a_checksum_has_no_mtime_digest(cards, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text(TEXT)
    assert open_corpus(["play"], from_file=str(tmp_path / "mine.txt")).mtime_digest == ""
    type_in(monkeypatch, TEXT.encode())
    assert open_corpus(["-"], spool=tmp_path).mtime_digest == ""
    assert open_corpus(["generated:words"]).mtime_digest == ""


def test_a_text_field_needs_rows(tmp_path):
    for suffix in (".txt", ".json", ".jsonl"):
        (tmp_path / f"rows{suffix}").write_text('{"body": "a"}\n')
    with pytest.raises(
        DataError, match=r"rows\.txt has no rows: --text-field.* Fix: .*end in \.jsonl"
    ):
        open_corpus([str(tmp_path / "rows.txt")], text_field="body")
    both = [str(tmp_path / "rows.json"), str(tmp_path / "rows.jsonl")]
    assert open_corpus(both, text_field="body").read_tasks
    assert open_corpus(both[:1], val=both[1:], text_field="body").read_tasks


def test_text_beside_rows_is_not_taken_where_a_part_of_a_row_is_masked(tmp_path):
    rows, text = tmp_path / "rows.jsonl", tmp_path / "notes.txt"
    rows.write_text('{"text": "a", "prompt": "b"}\n')
    text.write_text("a")
    assert open_corpus([str(rows), str(text)], text_field="text").read_tasks
    with pytest.raises(DataError, match=r"notes\.txt has no rows"):
        open_corpus([str(rows), str(text)], mask_field="prompt")


def test_files_passed_over_are_reported(tmp_path, said):
    for name in ("a.txt", "a.html", "b.html", "c.PY", "d.html.gz"):
        (tmp_path / name).write_text("text")
    open_corpus([str(tmp_path), "generated:words"], progress=said)
    assert said.lines == [
        f"{tmp_path}: 4 of its files are not read: 2 .html, 1 .html.gz, 1 .py. "
        "--include '*.html' reads them too."
    ]
    said.lines.clear()
    open_corpus([f"{tmp_path}/*.txt"], progress=said)
    assert said.lines == []


def test_a_pattern_to_include_must_match_a_file(tmp_path):
    for name in ("one/a.txt", "two/b.txt", "two/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    corpus = open_corpus(folders, include=["*.py"])
    assert [row.location for task in corpus.read_tasks for row in task.rows()] == [
        f"{folders[0]}/a.txt",
        f"{folders[1]}/b.py",
        f"{folders[1]}/b.txt",
    ]
    with pytest.raises(DataError, match=r"--include '\*\.pi' matches no file\."):
        open_corpus(folders, include=["*.py", "*.pi"])
