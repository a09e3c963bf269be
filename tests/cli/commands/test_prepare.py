import json

import pytest

from flatout.cli.commands.inspect import inspect
from flatout.cli.commands.prepare import prepare
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
    names = "path documents tokens bytes seconds tokens_per_s skipped skipped_by_reason"
    assert list(fields) == names.split()
    manifest = Dataset.open(tmp_path / "out").manifest
    assert fields["path"] == str(tmp_path / "out")
    counts = [fields[name] for name in ("documents", "tokens", "bytes", "skipped")]
    assert counts == [1, manifest.tokens, 10500, 0]
    assert fields["tokens_per_s"] == pytest.approx(fields["tokens"] / fields["seconds"], rel=0.1)
    some = {"max_documents": 20, "split": "tail 0.1", "tokenizer": "byte"}
    talks = prepare("capitals", tmp_path / "talks", chat="auto", **some)
    assert "of 20 documents\n" in talks.summary(), "not a part of their text"


@pytest.mark.slow
def test_the_summary_describes_the_dataset(book, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    sources, out = [str(book), str(tmp_path / "empty.txt")], tmp_path / "out"
    result = prepare(sources, out, tokenizer="char")
    for part in (
        f"{out}  written in",
        "10,502 of 1 document, 10.5 kB of text",
        "tokenizer  char, vocabulary 15\nsplit      tail 0.1: train",
        "omitted    1 x empty document",
    ):
        assert part in result.summary()
    assert result.skipped == 1
    again = prepare(sources, out, tokenizer="char")
    assert "already exists" in again.summary()
    assert (again.tokens, again.tokens_per_s) == (result.tokens, 0.0)


def test_files_that_are_not_read_are_in_the_result_the_summary_and_the_manifest(book, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.html", "b.html", "c.py"):
        (folder / name).write_text(name)
    book.rename(folder / "book.txt")
    texts = str(folder)
    result = prepare(texts, tmp_path / "out", tokenizer="byte")
    assert (result.skipped, result.skipped_by_reason) == (3, {".html file": 2, ".py file": 1})
    left_out = f"omitted    2 x .html file (first: {texts}/a.html)\n           1 x .py file"
    assert left_out in result.summary()
    skipped = Dataset.open(tmp_path / "out").manifest.skipped
    assert [(one.reason, one.count) for one in skipped] == [(".html file", 2), (".py file", 1)]
    options = {"tokenizer": "byte", "split": "tail 0.5", "max_documents": 1}
    code = prepare(texts, tmp_path / "code", include="*.py", **options)
    assert (code.documents, code.skipped_by_reason) == (1, {".html file": 2})
    assert Dataset.open(tmp_path / "code").manifest.source["include"] == ["*.py"]
    with pytest.raises(DataError, match=r"include is \['\*\.py'\], and None is requested"):
        prepare(texts, tmp_path / "code", **options)


def write_rows(path, field, count, texts):
    rows = ({field: f"row {number % texts}"} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_option_reaches_the_dataset(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", "body", 50, 50)
    with open(path, "a") as file:
        file.write("{")
    with pytest.raises(DataError, match="line 51"):
        prepare([path], tmp_path / "out", text_field="body")
    limits = {"max_documents": 20, "max_bytes": 60, "on_bad_row": "skip", "workers": 1}
    options = {"tokenizer": "byte", "text_field": "body", "split": "tail 0.5", **limits}
    result = prepare([path], tmp_path / "out", **options)
    assert (result.documents, result.bytes) == (12, 60)
    assert Dataset.open(tmp_path / "out").manifest.split_rule == "tail 0.5"


def test_val_is_repeatable_and_never_training_text(book, tmp_path):
    first, second = (tmp_path / f"{name}.txt" for name in ("a", "b"))
    for path in (first, second):
        path.write_text(f"It was {path.stem} day.")

    def made(sources, out, **options):
        return prepare(sources, tmp_path / out, tokenizer="char", **options)

    one = made([str(book)], "one", val=str(first))
    assert "split      named: train 10,501, val 14" in one.summary()
    both = made(str(book), "both", val=[first, second])
    assert (both.documents, both.tokens) == (3, 10_529)
    with pytest.raises(DataError, match=r"a.txt is both training and validation text"):
        made([str(tmp_path)], "new", val=[str(first)])


def test_the_engine_is_local_or_ray_and_excludes_parts(book, tmp_path):
    def made(**options):
        return prepare([str(book)], tmp_path / "out", tokenizer="byte", **options)

    with pytest.raises(UsageError, match=r"no engine named 'rai'.*Did you mean 'ray'"):
        made(engine="rai")
    for name, value in (("part", "1/2"), ("join", True)):
        words = rf"--engine ray and --{name} cannot be combined.*Remove one of the two"
        with pytest.raises(UsageError, match=words):
            made(engine="ray", **{name: value})
    assert made(engine="local").documents == 1


def test_a_recipe_names_a_tokenizer_and_so_excludes_one(book, tmp_path):
    with pytest.raises(UsageError, match="--tokenizer and --recipe cannot be combined"):
        prepare([str(book)], tmp_path / "out", tokenizer="char", recipe="demo-char")
    assert not (tmp_path / "out").exists()


def test_a_document_cut_for_validation_counts_once(book, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "abab"}\n' + '{"text": "cc"}\n' * 2)
    for split in ("tail 0.625", "tail 0.25"):
        made = prepare([str(rows)], tmp_path / split, tokenizer="byte", split=split)
        assert made.documents == 3
        assert inspect(tmp_path / split).value("documents") == 3
