import io

import fsspec
import pytest
from corpora import open_corpus, texts

from flatout.errors import ConfigError, DataError

JSONL = b'\n {"text": "one"}\n{"text": "two"}\n'


def type_in(monkeypatch, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_remote_files_are_read_in_place():
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/corpus/a.jsonl", b'{"text": "one", "q": "ask"}\n{"text": "two", "q": ""}\n')
    try:
        corpus = open_corpus(["memory://corpus/*.jsonl"], mask_field="q")
        before = corpus.fingerprint
        assert [(row.prompt, row.text) for task in corpus.read_tasks for row in task.rows()] == [
            ("ask", "one"),
            ("", "two"),
        ]
        filesystem.pipe("/corpus/a.jsonl", b'{"text": "one"}\n')
        assert open_corpus(["memory://corpus/*.jsonl"]).fingerprint != before
    finally:
        filesystem.rm("/corpus", recursive=True)


def test_a_source_receives_the_fields_it_accepts(tmp_path, monkeypatch):
    (tmp_path / "fielded.py").write_text(
        "def rows(fields, first='a'):\n    yield from (first, fields.text, fields.prompt or '-')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert texts(open_corpus(["fielded:rows"])) == ["a", "text", "-"]
    opened = open_corpus(["fielded:rows:first=b"], text_field="content", mask_field="q")
    assert texts(opened) == ["b", "content", "q"]


def test_standard_input_is_a_source(tmp_path, monkeypatch):
    type_in(monkeypatch, JSONL)
    corpus = open_corpus(["-"], spool=tmp_path)
    assert texts(corpus) == texts(corpus) == ["one", "two"]
    type_in(monkeypatch, JSONL)
    (tmp_path / "else").mkdir()
    assert open_corpus(["-"], spool=tmp_path / "else").fingerprint == corpus.fingerprint
    with pytest.raises(DataError, match="Standard input is named twice"):
        open_corpus(["-", "-"])


def test_a_source_takes_parameters():
    assert len(texts(open_corpus(["generated:words:documents=3,seed=5"]))) == 3
    with pytest.raises(DataError, match="documents, seed"):
        open_corpus(["generated:words:document=3"])
    with pytest.raises(DataError, match="'3' is not a parameter"):
        open_corpus(["python-stdlib:3"])
    with pytest.raises(DataError, match="cannot be parsed"):
        open_corpus(["python-stdlib:seed=[1"])


@pytest.mark.slow
def test_dashes_and_underscores_in_source_names_are_equivalent():
    assert open_corpus(["python_stdlib"]).fingerprint == open_corpus(["python-stdlib"]).fingerprint


def test_a_user_defined_source_is_found(tmp_path, monkeypatch):
    (tmp_path / "own_source.py").write_text(
        "def lines(count=2):\n    for n in range(count):\n        yield f'line {n}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert texts(open_corpus(["own_source:lines"])) == ["line 0", "line 1"]
    assert texts(open_corpus(["own_source:lines:count=3"])) == ["line 0", "line 1", "line 2"]
    with pytest.raises(ConfigError, match="Did you mean 'lines'"):
        open_corpus(["own_source:line"])


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=r"no file, source or dataset named 'shakespear'.*Did you mean 'shakespeare'",
    ):
        open_corpus(["shakespear"])
    (tmp_path / "novels").mkdir()
    with pytest.raises(DataError, match="Did you mean 'novels'"):
        open_corpus(["novel"])
    with pytest.raises(DataError, match="There is no file"):
        open_corpus(["novel.txt"])


def test_an_option_without_effect_on_a_source_is_rejected():
    with pytest.raises(DataError, match=r"--include '\*\.py' matches no file"):
        open_corpus(["python-stdlib"], include=["*.py"])
    for option in ({"text_field": "body"}, {"text_field": "text"}, {"mask_field": "body"}):
        with pytest.raises(DataError, match=r"python-stdlib has no rows: .*Fix: Remove them"):
            open_corpus(["python-stdlib"], **option)
