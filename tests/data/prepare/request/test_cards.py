import re

import pytest
from corpora import TEXT, open_corpus, texts

from flatout.config.registry import DATASETS
from flatout.data.prepare.request import inputs
from flatout.data.prepare.request.inputs import Card, load_card
from flatout.data.prepare.request.options import parse_rule
from flatout.errors import ConfigError, DataError


@pytest.fixture
def web(cards):
    """A card of a repository."""
    cards["web"] = {
        "repository": "org/web",
        "revision": "a" * 40,
        "files": "train/*",
        "license": "x",
        "text_field": "body",
    }
    return cards["web"]


@pytest.fixture
def opened(monkeypatch):
    """The paths inside the repository, and the fields, that sources are opened with."""
    calls = []
    source_tasks = inputs.source_tasks

    def read(name, parameters, fields):
        path = parameters["path"]
        name_there = path.partition("/web@" + "a" * 40 + "/")[2]
        calls.append((name_there, fields["fields"].text, fields["fields"].prompt))
        return [] if path.startswith("hf://") else source_tasks(name, parameters, fields)

    monkeypatch.setattr(inputs, "source_tasks", read)
    return calls


@pytest.mark.parametrize("name", DATASETS.names())
def test_every_card_is_valid(name):
    card = load_card(name)
    assert (card.url or "https://").startswith("https://")
    ways = (card.url and card.sha256 and card.num_bytes, card.repository and card.files, card.file)
    assert ways.count(None) == 2
    assert card.file is None or DATASETS.path(name).with_name(card.file).is_file()
    assert card.repository is None or re.fullmatch("[0-9a-f]{40}", card.revision), (
        "a branch moves, a commit does not"
    )
    assert card.license
    assert (card.validation is None) == (card.split is not None and bool(parse_rule(card.split)))
    assert DATASETS.describe(name)


def test_the_shakespeare_card_names_its_file():
    card = load_card("shakespeare")
    assert card.sha256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert (card.num_bytes, card.split) == (1_115_394, "tail 0.1")
    with pytest.raises(ConfigError, match="shakespeare"):
        load_card("shakespear")


def test_an_invalid_card_is_rejected_with_its_key(cards):
    cards["play"]["sha265"] = "x"
    with pytest.raises(DataError, match=r"play\.yaml: sha265"):
        load_card("play")
    assert Card.model_config["frozen"]


def test_a_repository_is_read_in_place(web, opened):
    open_corpus(["web"])
    open_corpus(["web"], text_field="title", mask_field="q")
    assert opened == [("train/*", "body", None), ("train/*", "title", "q")]
    with pytest.raises(DataError, match="web is not the download of a single file, so --from"):
        open_corpus(["web"], from_file="mine.parquet")


def test_options_take_precedence_over_a_cards_validation_files(web, opened, tmp_path):
    web["validation"] = "valid/*"
    (tmp_path / "mine.txt").write_text(TEXT)
    own = open_corpus(["web"])
    url = f"hf://datasets/org/web@{'a' * 40}/valid/*"
    assert (own.split, own.validation.names) == (None, (url,))
    open_corpus(["web"], text_field="title")
    assert opened == [
        (name, field, None) for field in ("body", "title") for name in ("train/*", "valid/*")
    ]
    opened.clear()
    by_rule = open_corpus(["web"], split="hash 0.1")
    assert (by_rule.split, by_rule.validation) == ("hash 0.1", None)
    assert open_corpus(["web", str(tmp_path / "mine.txt")]).validation is None, (
        "a card's validation files are for that card alone"
    )
    other = open_corpus(["web"], val=[str(tmp_path / "mine.txt")])
    assert texts(other.validation) == [TEXT]
    assert "valid/*" not in [name for name, *_ in opened]


def test_from_replaces_a_cards_download(cards, tmp_path):
    (tmp_path / "mine.txt").write_text(TEXT)
    corpus = open_corpus(["play"], from_file=str(tmp_path / "mine.txt"))
    assert texts(corpus) == [TEXT]
    assert corpus.split == "tail 0.2"


def test_a_card_that_cannot_be_downloaded_names_from(cards, tmp_path):
    cards["play"]["url"] = "http://127.0.0.1:9/input.txt"
    (tmp_path / "file").write_text("x")
    for cache, words in (
        (tmp_path / "cache", r"Cannot read http://127\.0\.0\.1:9.*Or pass the file with --from"),
        (tmp_path / "file", r"Cannot write .*variable FLATOUT_CACHE, or pass the file with --from"),
    ):
        with pytest.raises(DataError, match=words):
            open_corpus(["play"], cache=cache)
    del cards["play"]["num_bytes"]
    with pytest.raises(DataError, match="has a url without sha256 or num_bytes"):
        load_card("play")


def test_a_cached_file_gives_the_same_dataset(cards, tmp_path):
    (tmp_path / "cache" / "play").mkdir(parents=True)
    (tmp_path / "cache" / "play" / "input.txt").write_text(TEXT)
    (tmp_path / "mine.txt").write_text(TEXT)
    cached = open_corpus(["play"], cache=tmp_path / "cache")
    given = open_corpus(["play"], from_file=str(tmp_path / "mine.txt"))
    assert texts(cached) == [TEXT]
    assert cached.fingerprint == given.fingerprint


def test_downloads_are_found_in_the_cache_that_the_environment_names(cards, tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "play").mkdir(parents=True)
    (tmp_path / "cache" / "play" / "input.txt").write_text(TEXT)
    assert texts(open_corpus(["play"])) == [TEXT]


def test_a_card_takes_precedence_over_a_directory_of_its_name(cards, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play").mkdir()
    (tmp_path / "play" / "a.txt").write_text("mine")
    (tmp_path / "cache" / "play").mkdir(parents=True)
    (tmp_path / "cache" / "play" / "input.txt").write_text(TEXT)
    assert texts(open_corpus(["play"], cache=tmp_path / "cache", progress=said)) == [TEXT]
    assert "./play" in said.lines[0]
    assert texts(open_corpus(["./play"])) == ["mine"]


def test_a_text_field_that_equals_the_default_is_stated_too(web, opened):
    open_corpus(["web"], text_field="text")
    assert opened == [("train/*", "text", None)]
