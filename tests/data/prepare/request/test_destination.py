import os

import pytest
from prepared import Listener, content, prepared

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.errors import DataError


def test_preparing_again_reports_that_nothing_is_to_do(book, tmp_path):
    first = prepared(book, out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    listener = Listener()
    again = prepared(book, out=tmp_path / "out", progress=listener)
    assert again.existed
    assert again.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == before
    assert "already contains this dataset" in listener.said[0]
    assert listener.tasks == []


def test_moved_text_is_the_same_dataset(book, tmp_path):
    prepared(book, out=tmp_path / "out")
    (tmp_path / "moved").mkdir()
    moved = book.rename(tmp_path / "moved" / "book.txt")
    os.utime(moved, (0, 0))
    assert prepared(moved, out=tmp_path / "out").existed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer": "char"}, "tokenizer is 'byte', and 'char' is requested"),
        ({"split": "tail 0.5"}, "split is None, and 'tail 0.5' is requested"),
        ({"max_documents": 5}, "max_documents is None, and 5 is requested"),
        ({"text_field": "body"}, "text_field is 'text', and 'body' is requested"),
    ],
)
def test_a_different_dataset_is_rejected_and_kept(tmp_path, changed, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one two three", "body": "two"}\n' * 20)
    prepared(rows, out=tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(DataError, match=message):
        prepared(rows, out=tmp_path / "out", **{"tokenizer": "byte", **changed})
    assert content(tmp_path / "out") == before


def test_changed_text_is_a_different_dataset(book, tmp_path):
    prepared(book, out=tmp_path / "out")
    book.write_text(book.read_text().replace("Sentence 7 ", "Sentence X "))
    with pytest.raises(DataError, match="the text has changed"):
        prepared(book, out=tmp_path / "out")
    with pytest.raises(DataError, match=r"its text is .*book\.txt, and python-stdlib is requested"):
        prepared("python-stdlib", out=tmp_path / "out")


def test_a_tokenizer_file_is_identified_by_its_content(book, tmp_path):
    first = prepared(book, out=tmp_path / "first", tokenizer="train:300")
    options = Options(tokenizer=str(first.path / "tokenizer.json"))
    second = prepare_dataset([str(book)], tmp_path / "second", options)
    assert content(first.path)["00000.bin"] == content(second.path)["00000.bin"]
    assert content(first.path)["tokenizer.json"] == content(second.path)["tokenizer.json"]
    assert prepared(book, out=tmp_path / "second", tokenizer=str(first.path)).existed
    other = prepared("generated:words:documents=20", out=tmp_path / "other", tokenizer="train:300")
    with pytest.raises(DataError, match="tokenizer is 'sha256:"):
        prepared(book, out=tmp_path / "second", tokenizer=str(other.path))


def test_an_occupied_directory_is_rejected_before_any_work(book, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    listener = Listener()
    with pytest.raises(DataError, match="is not an empty directory"):
        prepare_dataset([str(book)], tmp_path / "out", Options(), progress=listener)
    assert content(tmp_path / "out") == {"thesis.txt": b"precious"}
    assert listener.tasks == []
    with pytest.raises(DataError, match="is not an empty"):
        prepare_dataset([str(book)], book, Options())
    (tmp_path / "empty").mkdir()
    assert prepared(book, out=tmp_path / "empty").manifest.documents == 1
