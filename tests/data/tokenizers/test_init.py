"""Finding a tokenizer by its name or file, and its end-of-text token."""

import json
import os

import pytest
from some_tokenizers import definition, tiktoken_file
from texts import CORPUS, byte_level_json

from flatout.cli.commands.prepare import TokenizerName
from flatout.data.tokenizers import FORMS, load_tokenizer, make_tokenizer, parse_tokenizer
from flatout.errors import DataError

ADDED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def give(limit):
    return iter(CORPUS)


def word_level(**parts) -> str:
    vocabulary = {"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3}
    document = {
        "version": "1.0",
        "added_tokens": [ADDED | {"id": 1, "content": "<|endoftext|>", "special": True}],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    return json.dumps(document | parts)


def test_the_help_of_prepare_names_every_form():
    """The help is a literal, because importing tokenizers would slow down each `--help`."""
    [option] = TokenizerName.__metadata__
    assert [form for form in FORMS if form not in option.help] == []


def test_a_directory_names_its_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("gpt2")))
    assert make_tokenizer(str(tmp_path), give).content == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("spec", "files", "wanted"),
    [
        ("cahr", (), "Did you mean 'char'.*Give byte, char, ids:N, train:N, a tokenizer.json"),
        ("./tokeniser.json", ("tokenizer.json",), r"Did you mean 'tokenizer\.json'"),
        ("./", (), r"has no tokenizer\.json\. Fix: Name a directory that has one"),
        ("./", ("own.tiktoken",), r"Name the file: '.*own\.tiktoken'\."),
    ],
)
def test_what_is_not_there_gets_a_hint(tmp_path, monkeypatch, spec, files, wanted):
    monkeypatch.chdir(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(tiktoken_file([]))
    with pytest.raises(DataError, match=wanted):
        make_tokenizer(spec, give)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        *((content, r"x\.json is not a tokenizer") for content in ("", "{", "[]", "{}", '"text"')),
        ('{"model": 3}', r"x\.json is not a tokenizer"),
        (word_level(normalizer={"type": "Unknown"}), r"x\.json is not a tokenizer"),
        (
            '{"format": "flatout-tokenizer", "format_version": 1, "kind": "byte"}',
            r"x\.json is a tokenizer in a format of earlier versions of flatout\. "
            "Fix: Prepare the dataset again",
        ),
        (
            word_level(model={"type": "WordLevel", "vocab": {"z": 2**32 - 2}, "unk_token": "z"}),
            r"has the id 4,294,967,294\. Ids must be below 16,777,216",
        ),
        (
            word_level(model={"type": "WordLevel", "vocab": {"a": 2, "b": 2}, "unk_token": "a"}),
            "'a' and 'b' the same id, 2, so that text is lost",
        ),
        (
            word_level(added_tokens=[ADDED | {"id": 2, "content": "</s>", "special": True}]),
            "'a' and '</s>' the same id, 2",
        ),
    ],
)
def test_an_unusable_file_is_named(content, wanted):
    with pytest.raises(DataError, match=wanted):
        parse_tokenizer(content, "x.json")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}}, "Missing"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
    ],
)
def test_an_engine_that_fails_is_a_bad_row(parts, reason):
    broken = parse_tokenizer(word_level(decoder={"type": "Fuse"}, **parts), "x.json")
    with pytest.raises(DataError, match=rf"The tokenizer 'wordlevel-\d' fails: .*{reason}"):
        broken.encode("c")


@pytest.mark.parametrize("kind", ["fifo", "large"])
def test_special_and_large_files_are_not_read(tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    wanted = "is not a regular file" if kind == "fifo" else "is larger than 128 MiB"
    with pytest.raises(DataError, match=wanted):
        load_tokenizer(path)


def test_an_unusual_end_of_text_must_be_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_json(CORPUS, 320, "<fin>"))
    with pytest.raises(DataError, match="--end-of-text"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="Did you mean '<fin>'"):
        load_tokenizer(path, end_of_text="<fim>")
    tokenizer = load_tokenizer(path, end_of_text="<fin>")
    assert tokenizer.eot_id not in tokenizer.encode("a<fin>b")
    assert tokenizer.decode(tokenizer.encode("a<fin>b")) == "a<fin>b"


@pytest.mark.parametrize(
    ("files", "option", "end", "named"),
    [
        ({}, None, "<|endoftext|>", {}),
        ({}, "<|im_end|>", "<|im_end|>", {}),
        ({"tokenizer_config.json": {"pad_token": "[absent]"}}, None, "<|endoftext|>", {}),
        (
            {"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}, "add_bos": True}},
            None,
            "<|im_end|>",
            {"eos_token": "<|im_end|>"},
        ),
        (
            {
                "special_tokens_map.json": {"bos_token": "<|im_start|>", "eos_token": "A"},
                "tokenizer_config.json": {"eos_token": "<|im_end|>"},
            },
            "<|endoftext|>",
            "<|endoftext|>",
            {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        ),
        ({"config.json": {"eos_token_id": [401, 3]}}, None, "<|im_start|>", {}),
        ({"config.json": {"eos_token_id": 3}}, None, "<|endoftext|>", {}),
    ],
)
def test_the_end_of_text_is_the_stated_one_and_stays_so_when_stored(
    tmp_path, files, option, end, named
):
    document = definition("qwen2")
    ids = {one["content"]: one["id"] for one in document["added_tokens"]}
    given = tmp_path / "given"
    given.mkdir()
    (given / "tokenizer.json").write_text(json.dumps(document))
    for name, content in files.items():
        changed = json.dumps(content).replace("401", str(ids["<|im_start|>"]))
        (given / name).write_text(changed)
    tokenizer = load_tokenizer(given / "tokenizer.json", end_of_text=option)
    assert (tokenizer.end_of_text, tokenizer.named) == (end, named)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json", sha256=tokenizer.digest())
    assert (again.eot_id, again.content) == (ids[end], tokenizer.content)
    assert again.named == (named | {"eos_token": end} if tokenizer.settings else {})
    assert (tmp_path / "tokenizer_config.json").exists() == bool(tokenizer.settings)
    assert bool(tokenizer.settings) == (bool(named) or end != "<|endoftext|>")
    if tokenizer.settings:
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(DataError, match="is damaged or was replaced"):
            load_tokenizer(tmp_path / "tokenizer.json", sha256=tokenizer.digest())
