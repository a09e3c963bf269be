import json

import fsspec
import pytest

from flatout.commands.inspect import inspect
from flatout.commands.prepare import prepare
from flatout.data.store.remote import open_dataset
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, UsageError


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was a dark night. " * 500)
    return path


def test_the_result_has_the_fields_of_the_command_line(book, tmp_path):
    result = prepare([str(book)], tmp_path / "out")
    fields = json.loads(result.model_dump_json())
    assert list(fields) == [
        "path",
        "documents",
        "tokens",
        "bytes",
        "seconds",
        "tokens_per_s",
        "skipped",
        "skipped_by_reason",
    ]
    manifest = Dataset.open(tmp_path / "out").manifest
    assert fields["path"] == str(tmp_path / "out")
    assert (fields["documents"], fields["tokens"], fields["bytes"], fields["skipped"]) == (
        1,
        manifest.tokens,
        10500,
        0,
    )
    assert fields["tokens_per_s"] == pytest.approx(fields["tokens"] / fields["seconds"], rel=0.1)


def test_the_summary_of_conversations_does_not_give_a_part_of_their_text_as_all(tmp_path):
    result = prepare("capitals:documents=20", tmp_path / "out", tokenizer="byte", chat="auto")
    assert " tokens of 20 documents\n" in result.summary()


@pytest.mark.slow
def test_the_summary_describes_the_dataset(book, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    result = prepare([str(book), str(tmp_path / "empty.txt")], tmp_path / "out", tokenizer="char")
    assert f"{tmp_path / 'out'}  written in" in result.summary()
    assert (
        "10,502 tokens of 1 document (its end is for validation), 0.01 MB of text"
        in result.summary()
    )
    assert "tokenizer char, vocabulary 15; split by tail 0.1" in result.summary()
    assert "left out: 1 empty document" in result.summary()
    assert result.skipped == 1
    again = prepare([str(book), str(tmp_path / "empty.txt")], tmp_path / "out", tokenizer="char")
    assert "already exists" in again.summary()
    assert (again.tokens, again.tokens_per_s) == (result.tokens, 0.0)


def test_files_that_are_not_read_are_in_the_result_the_summary_and_the_manifest(book, tmp_path):
    for name in ("a.html", "b.html", "c.py"):
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    book.rename(tmp_path / "texts" / "book.txt")
    texts = str(tmp_path / "texts")
    result = prepare(texts, tmp_path / "out", tokenizer="byte")
    assert (result.skipped, result.skipped_by_reason) == (3, {".html file": 2, ".py file": 1})
    assert (
        f"left out: 2 .html files (first: {texts}/a.html)\n  left out: 1 .py file"
        in result.summary()
    )
    assert [(one.reason, one.count) for one in Dataset.open(tmp_path / "out").manifest.skipped] == [
        (".html file", 2),
        (".py file", 1),
    ]
    code = prepare(
        texts,
        tmp_path / "code",
        tokenizer="byte",
        include="*.py",
        split="tail 0.5",
        max_documents=1,
    )
    assert (code.documents, code.skipped_by_reason) == (1, {".html file": 2})
    assert Dataset.open(tmp_path / "code").manifest.source["include"] == ["*.py"]
    with pytest.raises(DataError, match=r"include is \['\*\.py'\], and None is requested"):
        prepare(texts, tmp_path / "code", tokenizer="byte", split="tail 0.5", max_documents=1)


def test_the_encoding_identifies_a_dataset(tmp_path):
    (tmp_path / "a.txt").write_bytes("café. ".encode("cp1252") * 100)
    made = prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="char", encoding="CP1252")
    assert made.bytes == 700
    assert Dataset.open(tmp_path / "out").manifest.source["encoding"] == "cp1252"
    assert (
        prepare(
            str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="char", encoding="windows-1252"
        ).tokens_per_s
        == 0
    )
    with pytest.raises(DataError, match="encoding is 'cp1252', and 'cp1251' is requested"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="char", encoding="cp1251")


def test_every_option_reaches_the_dataset(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"body": f"row {number}"}) + "\n" for number in range(50)) + "{"
    )
    with pytest.raises(DataError, match="line 51"):
        prepare([str(path)], tmp_path / "out", text_field="body")
    result = prepare(
        [str(path)],
        tmp_path / "out",
        tokenizer="byte",
        text_field="body",
        split="tail 0.5",
        max_documents=20,
        max_bytes=60,
        on_bad_row="skip",
        workers=1,
    )
    assert result.documents == 12
    assert result.bytes == 60
    assert Dataset.open(tmp_path / "out").manifest.split_rule == "tail 0.5"


def test_val_is_repeatable_and_duplicates_of_training_text_are_dropped(book, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"It was {name} day.")
    one = prepare([str(book)], tmp_path / "one", tokenizer="char", val=str(tmp_path / "a.txt"))
    assert "split by named: train 10,501, val 14" in one.summary()
    both = prepare(
        str(book), tmp_path / "both", tokenizer="char", val=[tmp_path / "a.txt", tmp_path / "b.txt"]
    )
    assert (both.documents, both.tokens) == (3, 10_529)
    with pytest.raises(DataError, match=r"a.txt is both training and validation text"):
        prepare([str(tmp_path)], tmp_path / "new", tokenizer="char", val=[str(tmp_path / "a.txt")])
    dropped = prepare(
        [str(book), str(tmp_path / "a.txt")],
        tmp_path / "new",
        tokenizer="char",
        val=[str(tmp_path / "a.txt")],
        duplicates="drop",
    )
    assert dropped.summary().endswith(
        f"left out: 1 duplicate document (first: {tmp_path / 'a.txt'})"
    )


def test_duplicates_are_counted_in_the_summary(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"row {number % 30}"}) + "\n" for number in range(50))
    )
    result = prepare(
        [str(path)], tmp_path / "out", tokenizer="byte", split="tail 0.7", duplicates="drop"
    )
    assert (result.documents, result.skipped) == (30, 20)
    assert result.summary().endswith(f"left out: 20 duplicate documents (first: {path}, line 31)")


def test_the_engine_is_local_or_ray_and_excludes_parts(book, tmp_path):
    with pytest.raises(UsageError, match=r"no engine named 'rai'.*Did you mean 'ray'"):
        prepare([str(book)], tmp_path / "out", tokenizer="byte", engine="rai")
    for given in ({"part": "1/2"}, {"join": True}):
        with pytest.raises(
            UsageError,
            match=(
                rf"--engine ray and --{next(iter(given))} cannot be combined.*Leave one of the two "
                rf"out"
            ),
        ):
            prepare([str(book)], tmp_path / "out", tokenizer="byte", engine="ray", **given)
    assert prepare([str(book)], tmp_path / "out", tokenizer="byte", engine="local").documents == 1


def test_a_document_cut_for_validation_counts_once(book, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "abab"}\n' + '{"text": "cc"}\n' * 2)
    for split, duplicates, documents in (
        ("tail 0.625", "keep", 3),
        ("tail 0.25", "keep", 3),
        ("tail 0.75", "drop", 2),
    ):
        out = tmp_path / f"{split}-{duplicates}"
        made = prepare([str(rows)], out, tokenizer="byte", split=split, duplicates=duplicates)
        assert made.documents == documents
        assert ("of one, the end is for validation" in made.summary()) == (split == "tail 0.625")
        assert inspect(out).value("documents") == documents
    assert inspect(tmp_path / "tail 0.625-keep").value("cut_documents") == 1
    assert inspect(tmp_path / "tail 0.25-keep").value("cut_documents") is None


def test_out_may_be_a_url(book, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    url = "memory://commands/book"
    result = prepare([str(book)], url, tokenizer="char")
    assert json.loads(result.model_dump_json())["path"] == url
    assert f"{url}  written in" in result.summary()
    assert open_dataset(url).manifest.tokens == result.tokens
    assert "already exists" in prepare([str(book)], f"{url}/", tokenizer="char").summary()
    for parameters in ({"part": "1/2"}, {"join": True}):
        with pytest.raises(
            UsageError,
            match="needs a directory that all parts share, and memory://commands/book is a URL",
        ):
            prepare([str(book)], url, **parameters)
    fsspec.filesystem("memory").rm("/commands", recursive=True)
