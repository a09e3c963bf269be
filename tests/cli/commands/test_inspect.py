import json

import numpy as np
import pytest

from flatout.cli.commands.inspect import inspect
from flatout.cli.commands.prepare import prepare as prepare_dataset
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.store.manifest import SkippedRows
from flatout.data.tokenizers import make_tokenizer
from flatout.display import terminal_text
from flatout.errors import DataError
from flatout.progress import SILENT
from flatout.storage.json_io import append_line


def prepare(out, train, val=(), *, skipped=()):
    tokenizer = make_tokenizer("byte", lambda: iter([]), pattern=None, progress=SILENT)
    with DatasetWriter(out, tokenizer) as writer:
        for split, texts in (("train", train), ("val", val)):
            for text in texts:
                tokens = [*tokenizer.encode(text), tokenizer.eot_id]
                writer.append(split, np.array(tokens), [len(tokens)], text_bytes=len(text.encode()))
        facts = {"source": {"kind": "test", "seed": 3}, "split_rule": "tail 0.1"}
        manifest = writer.finish(**facts)
    told = manifest.model_copy(update={"skipped": tuple(skipped)}).sealed()
    (out / "manifest.json").write_text(told.model_dump_json())
    return out


@pytest.fixture
def folder(tmp_path):
    skipped = [SkippedRows(reason="not UTF-8", count=1234, first=("a.txt:7",))]
    return prepare(
        tmp_path / "set", ["Hello\nworld", "a", "", " x" * 20], ["valid"], skipped=skipped
    )


def test_the_result_contains_the_facts(folder):
    result = inspect(folder)
    assert result.path == str(folder)
    for name, value in {
        "tokens": 12 + 2 + 1 + 41 + 6,
        "documents": 5,
        "text_bytes": 11 + 1 + 0 + 40 + 5,
        "vocab_size": 257,
        "dtype": "uint16",
        "source": {"kind": "test", "seed": 3},
        "split_rule": "tail 0.1",
        "train": {"documents": 4, "tokens": 56, "text_bytes": 52},
        "val": {"documents": 1, "tokens": 6, "text_bytes": 5},
        "special_tokens": {"<|endoftext|>": 256},
        "skipped": [{"reason": "not UTF-8", "count": 1234, "first": ["a.txt:7"]}],
        "shortest_document": 1,
        "median_document": 6,
        "longest_document": 41,
        "size_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "targets": None,
        "bytes_per_token": 0.919,
        "no such fact": None,
    }.items():
        assert result.value(name) == value, name
    assert result.value("beginning").startswith("Hello\nworld")
    assert "«" not in result.summary()
    assert inspect(folder, tokens=5).value("beginning") == "Hello"
    assert "first text" not in inspect(folder, tokens=0).summary()
    document = json.loads(result.model_dump_json())
    assert sorted(document) == ["items", "path"]
    assert {"name": "documents", "value": 5} in document["items"]


def test_masked_text_is_marked_and_not_counted_in_bytes_per_token(tmp_path):
    for number in range(10):
        row = {"prompt": f"Käfer {number}?", "text": f"answer {number}."}
        append_line(tmp_path / "rows.jsonl", row)
    options = {"tokenizer": "byte", "mask_field": "prompt", "workers": 1}
    prepare_dataset([tmp_path / "rows.jsonl"], tmp_path / "set", **options)
    result = inspect(tmp_path / "set")
    assert result.value("text_bytes") == 90
    assert result.value("targets") == 90 + 10
    assert result.value("tokens") == 90 + 10 + 90
    assert result.value("bytes_per_token") == 0.9
    start = "«Käfer 0?»answer 0.<|endoftext|>«Käfer 1?»answer 1."
    assert result.value("beginning").startswith(start)
    assert "first text (text in «» is excluded from the loss)" in result.summary()
    assert inspect(tmp_path / "set", tokens=0).value("beginning") == ""


def test_the_special_tokens_of_a_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["plain"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(str(tmp_path / "tokenizer.json"), lambda _: iter([]))
    with DatasetWriter(tmp_path / "set", tokenizer) as writer:
        writer.append("train", np.array([0, 1, 3]), [3], text_bytes=2)
        writer.finish(source={}, split_rule="named")
    assert inspect(tmp_path / "set").value("special_tokens") == {"</s>": 3, "<s>": 2}


def test_the_summary_is_readable_text_that_fits_a_screen(folder):
    shown = terminal_text(inspect(folder).display(), 80).splitlines()
    assert shown[0].startswith("Dataset")
    assert str(folder) in "".join(shown[:3])
    assert ["vocab_size", "257"] in [line.split() for line in shown]
    assert any("reason not UTF-8, count 1,234, first a.txt:7" in line for line in shown)
    assert shown[shown.index("first text") + 1] == "| Hello"
    assert len(shown) <= 28
    assert max(map(len, shown)) <= 80


def test_a_document_that_is_cut_at_the_start_of_validation_counts_once(tmp_path):
    (tmp_path / "book.txt").write_text("word " * 200)
    prepare_dataset(
        [tmp_path / "book.txt"], tmp_path / "set", tokenizer="byte", split="tail 0.1", workers=1
    )
    result = inspect(tmp_path / "set")
    assert result.value("documents") == 1
    names = ("shortest_document", "median_document", "longest_document", "tokens")
    assert {result.value(name) for name in names} == {1000 + 2}, "each piece has its end-of-text"


def test_text_cannot_control_the_terminal(tmp_path):
    result = inspect(prepare(tmp_path / "set", ["\x1b[2Jgone\x07"]))
    assert "\x1b" in result.value("beginning")
    assert "\x1b" not in result.summary()
    assert "\x07" not in result.summary()


def test_a_dataset_with_only_validation_text_and_an_empty_one(tmp_path):
    assert inspect(prepare(tmp_path / "val", [], ["only"])).value("beginning").startswith("only")
    empty = inspect(prepare(tmp_path / "empty", []))
    assert empty.value("tokens") == 0
    assert empty.value("longest_document") is None
    assert empty.summary()
    with pytest.raises(DataError, match="flatout prepare"):
        inspect(tmp_path)
