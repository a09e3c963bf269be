import hashlib
import io
import os
import re
from pathlib import Path

import fsspec
import pytest

from flatout.data.prepare import inputs as corpus
from flatout.data.prepare.inputs import Card, load_card, on_both_sides, open_corpus
from flatout.data.prepare.split_rule import parse_rule
from flatout.errors import ConfigError, DataError
from flatout.progress import SILENT
from flatout.registry import DATASETS

TEXT = "To be, or not to be.\n" * 10


def texts(opened):
    return [row.text for part in opened.parts for row in part.rows()]


@pytest.fixture
def cards(monkeypatch):
    """A card `play` of a file whose SHA-256 is that of TEXT, at an address that does not answer."""
    known = {
        "play": {
            "address": "http://127.0.0.1:9/play/input.txt",
            "revision": "1",
            "license": "public domain",
            "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
            "num_bytes": len(TEXT),
            "split": "tail 0.2",
        }
    }

    class Folder:
        def names(self):
            return sorted(known)

        def get(self, name):
            return known[name]

        def path(self, name):
            return Path(f"{name}.yaml")

    monkeypatch.setattr(corpus, "DATASETS", Folder())
    return known


@pytest.mark.parametrize("name", DATASETS.names())
def test_every_card_is_a_card(name):
    card = load_card(name)
    assert (card.address or "https://").startswith("https://")
    assert card.repository is None or re.fullmatch("[0-9a-f]{40}", card.revision), (
        "a branch moves, a commit stays"
    )
    assert card.license
    assert card.validation or parse_rule(card.split)
    assert DATASETS.describe(name)


def test_the_shakespeare_card_says_which_file():
    card = load_card("shakespeare")
    assert card.sha256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert (card.num_bytes, card.split) == (1_115_394, "tail 0.1")
    with pytest.raises(ConfigError, match="shakespeare"):
        load_card("shakespear")


def test_a_damaged_card_names_the_key(cards):
    cards["play"]["sha265"] = "x"
    with pytest.raises(DataError, match=r"play\.yaml: sha265"):
        load_card("play")
    assert Card.model_config["frozen"]


@pytest.mark.parametrize(
    "change",
    [
        {"files": "*.parquet"},
        {"validation": "*.parquet"},
        {"sha256": None},
        {"address": None, "sha256": None, "num_bytes": None},
        {"repository": "a/b", "files": "*"},
        {"address": None, "sha256": None, "num_bytes": None, "validation": "*"},
    ],
    ids=str,
)
def test_a_card_names_one_file_or_a_repository(cards, change):
    cards["play"] |= change
    with pytest.raises((ConfigError, DataError), match="names one file or a repository"):
        load_card("play")


def test_a_card_of_a_repository_is_read_at_its_address(cards, monkeypatch):
    cards["web"] = {
        "repository": "org/web",
        "revision": "a" * 40,
        "files": "data/*.parquet",
        "license": "x",
        "text_field": "content",
    }
    asked = []
    monkeypatch.setattr(corpus, "_source_parts", lambda *words: asked.append(words) or [])
    open_corpus(["web"])
    open_corpus(["web"], text_field="title", mask_field="q")
    address = {"path": f"hf://datasets/org/web@{'a' * 40}/data/*.parquet"}
    assert asked == [
        ("files", address, {"text_field": "content"}),
        ("files", address, {"text_field": "title", "mask_field": "q"}),
    ]
    with pytest.raises(DataError, match="web is not one file, so --from cannot give it"):
        open_corpus(["web"], from_file="mine.parquet")


def test_a_card_may_name_files_for_validation_and_a_rule_or_others_go_before_them(
    cards, tmp_path, monkeypatch
):
    cards["web"] = {
        "repository": "org/web",
        "revision": "a" * 40,
        "files": "train/*",
        "validation": "valid/*",
        "license": "x",
        "text_field": "body",
    }
    (tmp_path / "mine.txt").write_text(TEXT)
    asked = []
    reading = corpus._source_parts

    def read(name, parameters, fields):
        asked.append((parameters["path"].partition("/web@")[2][41:], fields))
        return [] if parameters["path"].startswith("hf://") else reading(name, parameters, fields)

    monkeypatch.setattr(corpus, "_source_parts", read)
    own = open_corpus(["web"])
    assert (own.split, own.validation.names) == (
        None,
        (f"hf://datasets/org/web@{'a' * 40}/valid/*",),
    )
    open_corpus(["web"], text_field="title")
    assert asked == [
        (name, {"text_field": field})
        for field in ("body", "title")
        for name in ("train/*", "valid/*")
    ]
    asked.clear()
    by_rule = open_corpus(["web"], split="hash 0.1")
    assert (by_rule.split, by_rule.validation) == ("hash 0.1", None)
    assert open_corpus(["web", str(tmp_path / "mine.txt")]).validation is None, (
        "several sources have no validation text of one"
    )
    other = open_corpus(["web"], val=[str(tmp_path / "mine.txt")])
    assert texts(other.validation) == [TEXT]
    assert "valid/*" not in [name for name, _ in asked]
    cards["web"]["split"] = "tail 0.1"
    with pytest.raises(ConfigError, match="a split rule or files for validation"):
        load_card("web")


def test_validation_text_is_whatever_text_may_be_but_a_card(cards, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    opened = open_corpus(
        [str(tmp_path / "a.txt")],
        val=["-", str(tmp_path / "b.txt"), "synthetic:documents=1,words=2"],
        spool=tmp_path,
    )
    assert texts(opened.validation)[:2] == ["typed", "b"]
    assert len(opened.all_parts) == len(opened.parts) + len(opened.validation.parts) == 4
    assert opened.all_parts[-1:] == opened.parts
    assert opened.fingerprint == open_corpus([str(tmp_path / "a.txt")]).fingerprint
    with pytest.raises(DataError, match="--val play is a data set card"):
        open_corpus([str(tmp_path / "a.txt")], val=["play"])
    with pytest.raises(DataError, match="Standard input is named twice"):
        open_corpus(["-"], val=["-"])


def test_what_is_on_both_sides_is_found_by_content_or_mark(tmp_path):
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

    def twice(name, *val):
        return on_both_sides(open_corpus([name], val=val))

    folder = str(tmp_path / "rows")
    assert twice(folder) is None
    assert twice(folder, str(tmp_path / "e.txt"), str(tmp_path / "f.txt")) is None
    assert twice(folder, str(tmp_path / "e.txt"), str(tmp_path / "d.txt")) == str(
        tmp_path / "d.txt"
    )
    assert twice(folder, f"{folder}/a.txt") == f"{folder}/a.txt"
    assert twice("synthetic:documents=5", "synthetic:documents=5,seed=1") is None
    assert "synthetic" in twice("synthetic:documents=5", "synthetic:documents=5")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/both/a.txt", b"one")
    memory.pipe_file("/both/b.txt", b"two")
    try:
        assert twice("memory://both/a.txt", "memory://both/b.txt") is None
        assert twice("memory://both/*.txt", "memory://both/a*").endswith("both/a.txt")
    finally:
        memory.rm("/both", recursive=True)


def test_a_cards_file_may_be_given(cards, tmp_path):
    (tmp_path / "mine.txt").write_text(TEXT)
    opened = open_corpus(["play"], from_file=str(tmp_path / "mine.txt"))
    assert texts(opened) == [TEXT]
    assert opened.split == "tail 0.2"


def test_a_given_file_must_be_the_very_file(cards, tmp_path):
    (tmp_path / "mine.txt").write_text(TEXT + "x")
    with pytest.raises(DataError, match="SHA-256"):
        open_corpus(["play"], from_file=str(tmp_path / "mine.txt"))


def test_a_cards_file_is_taken_from_the_cache_and_is_the_same_data(cards, tmp_path):
    (tmp_path / "cache" / "play").mkdir(parents=True)
    (tmp_path / "cache" / "play" / "input.txt").write_text(TEXT)
    (tmp_path / "mine.txt").write_text(TEXT)
    cached = open_corpus(["play"], cache=tmp_path / "cache")
    given = open_corpus(["play"], from_file=str(tmp_path / "mine.txt"))
    assert texts(cached) == [TEXT]
    assert cached.fingerprint == given.fingerprint


def test_from_needs_one_card(cards, tmp_path):
    (tmp_path / "mine.txt").write_text(TEXT)
    for names in (["synthetic"], [str(tmp_path / "mine.txt")], ["play", "play"]):
        with pytest.raises(DataError, match="--from gives the file of one data set card"):
            open_corpus(names, from_file=str(tmp_path / "mine.txt"))


def test_several_sources_follow_each_other_in_the_order_named(cards, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    opened = open_corpus([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    other = open_corpus([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert texts(opened) == ["b", "a"]
    assert opened.split is None
    assert opened.fingerprint != other.fingerprint


def test_an_address_is_read_where_it_is():
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/corpus/a.jsonl", b'{"text": "one", "q": "ask"}\n{"text": "two", "q": ""}\n')
    try:
        opened = open_corpus(["memory://corpus/*.jsonl"], mask_field="q")
        before = opened.fingerprint
        assert [(row.prompt, row.text) for part in opened.parts for row in part.rows()] == [
            ("ask", "one"),
            ("", "two"),
        ]
        filesystem.pipe("/corpus/a.jsonl", b'{"text": "one"}\n')
        assert open_corpus(["memory://corpus/*.jsonl"]).fingerprint != before
    finally:
        filesystem.rm("/corpus", recursive=True)


def test_a_source_is_given_the_fields_it_takes(tmp_path, monkeypatch):
    (tmp_path / "fielded.py").write_text("def rows(text_field='body'):\n    yield text_field\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert texts(open_corpus(["fielded:rows"])) == ["body"]
    assert texts(open_corpus(["fielded:rows"], text_field="content")) == ["content"]
    assert texts(open_corpus(["fielded:rows:text_field=own"], text_field="content")) == ["own"]
    with pytest.raises(
        DataError,
        match=r"'fielded:rows' has no rows, so it has no field 'q'.*Leave --mask-field out",
    ):
        open_corpus(["fielded:rows"], mask_field="q")


def test_standard_input_is_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b'\n {"text": "one"}\n{"text": "two"}\n'))
    )
    opened = open_corpus(["-"], spool=tmp_path)
    assert texts(opened) == texts(opened) == ["one", "two"]
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b'\n {"text": "one"}\n{"text": "two"}\n'))
    )
    (tmp_path / "else").mkdir()
    assert open_corpus(["-"], spool=tmp_path / "else").fingerprint == opened.fingerprint
    with pytest.raises(DataError, match="Standard input is named twice"):
        open_corpus(["-", "-"])


def test_a_name_that_is_not_utf8_has_a_fingerprint_too(tmp_path):
    (tmp_path / os.fsdecode(b"b\xfc.txt")).write_text("text")
    assert len(open_corpus([str(tmp_path)]).fingerprint) == 64


def test_a_source_takes_parameters():
    assert len(texts(open_corpus(["synthetic:documents=3,words=5"]))) == 3
    with pytest.raises(DataError, match="documents, words, seed"):
        open_corpus(["synthetic:document=3"])
    with pytest.raises(DataError, match="'3' is not a parameter"):
        open_corpus(["synthetic:3"])
    with pytest.raises(DataError, match="cannot be read"):
        open_corpus(["synthetic:seed=[1"])


def test_a_source_may_be_written_with_either_dash():
    assert open_corpus(["python_stdlib"]).fingerprint == open_corpus(["python-stdlib"]).fingerprint


def test_a_users_own_source_is_found(tmp_path, monkeypatch):
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
        match=r"no file, source or data set named 'shakespear'.*Did you mean 'shakespeare'",
    ):
        open_corpus(["shakespear"])
    (tmp_path / "novels").mkdir()
    with pytest.raises(DataError, match="Did you mean 'novels'"):
        open_corpus(["novel"])
    with pytest.raises(DataError, match="There is no file"):
        open_corpus(["novel.txt"])
    with pytest.raises(DataError, match="No source is named"):
        open_corpus([])


def test_a_folder_with_the_name_of_a_card_is_said(cards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play").mkdir()
    (tmp_path / "play" / "a.txt").write_text("mine")
    (tmp_path / "cache" / "play").mkdir(parents=True)
    (tmp_path / "cache" / "play" / "input.txt").write_text(TEXT)
    said = []

    class Listener:
        def say(self, line):
            said.append(line)

    assert texts(open_corpus(["play"], cache=tmp_path / "cache", progress=Listener())) == [TEXT]
    assert "./play" in said[0]
    assert texts(open_corpus(["./play"])) == ["mine"]


def test_files_that_may_change_have_a_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(name)
        os.utime(name, (5, 5))

    def moment(*names, **options):
        return open_corpus(names, **options).moment

    first = moment("a.txt", val=["b.txt"])
    assert first == moment("a.txt", val=["b.txt"]) == moment("./a.txt", "b.txt")
    os.utime("b.txt", (5, 6))
    assert len({first, moment("a.txt", val=["b.txt"]), moment("a.txt")}) == 3
    Path("b.txt").write_text("longer")
    os.utime("b.txt", (5, 5))
    assert moment("a.txt", "b.txt") != first


def test_what_a_checksum_marks_has_no_moment(cards, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text(TEXT)
    assert open_corpus(["play"], from_file=str(tmp_path / "mine.txt")).moment == ""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert open_corpus(["-"], spool=tmp_path).moment == ""
    assert open_corpus(["synthetic:documents=3"]).moment == ""


def test_a_field_is_refused_where_no_row_has_one(tmp_path):
    (tmp_path / "rows.txt").write_text('{"body": "a"}\n')
    (tmp_path / "rows.json").write_text('{"body": "a"}\n')
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(
        DataError,
        match=r"rows\.txt holds no rows, so it has no field 'body'\. Fix: .*end in \.jsonl",
    ):
        open_corpus([str(tmp_path / "rows.txt")], text_field="body")
    with pytest.raises(
        DataError,
        match=r"'synthetic' has no rows, so it has no field 'body'\. Fix: Leave --text-field out",
    ):
        open_corpus(["synthetic:documents=3"], text_field="body")
    assert open_corpus(
        [str(tmp_path / "rows.json"), str(tmp_path / "rows.jsonl")], text_field="body"
    ).parts
    assert open_corpus(
        [str(tmp_path / "rows.json")], val=[str(tmp_path / "rows.jsonl")], text_field="body"
    ).parts


class Listener(type(SILENT)):
    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path):
    for name in ("a.txt", "a.html", "b.html", "c.PY", "d.html.gz"):
        (tmp_path / name).write_text("text")
    listener = Listener()
    open_corpus([str(tmp_path), "synthetic:documents=3"], progress=listener)
    assert listener.said == [
        f"{tmp_path}: 4 of its files are not read: 2 .html, 1 .html.gz, 1 .py. --include '*.html' takes such files too."
    ]
    listener = Listener()
    open_corpus([f"{tmp_path}/*.txt"], progress=listener)
    assert listener.said == []


def test_a_pattern_of_files_to_include_fits_some(tmp_path):
    for name in ("one/a.txt", "two/b.txt", "two/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    corpus = open_corpus(folders, include=["*.py"])
    assert [row.name for part in corpus.parts for row in part.rows()] == [
        f"{folders[0]}/a.txt",
        f"{folders[1]}/b.py",
        f"{folders[1]}/b.txt",
    ]
    with pytest.raises(DataError, match=r"--include '\*\.pi' fits no file\."):
        open_corpus(folders, include=["*.py", "*.pi"])
    for parameters in ({"include": ["*.py"]}, {"encoding": "cp1252"}):
        with pytest.raises(
            DataError,
            match=rf"'synthetic' reads no files of yours.*Leave --{next(iter(parameters))} out",
        ):
            open_corpus(["synthetic:documents=3"], **parameters)
