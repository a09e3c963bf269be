"""gigatoken encodes where it gives the same ids. Where it cannot, one line gives the reason."""

import json
import sys
from contextlib import contextmanager
from importlib import metadata

import numpy as np
import pytest
from prepared import write_rows
from some_tokenizers import definition, pieces, tiktoken_file, tokenizer_of
from texts import CORPUS

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.tokenizers import engine_choice, engines, make_tokenizer
from flatout.data.tokenizers.engine_choice import choose_engine
from flatout.data.tokenizers.engines import Gigatoken, known_layout
from flatout.data.tokenizers.make import from_tiktoken
from flatout.errors import DataError
from flatout.progress import SILENT

TEXTS = CORPUS * 30


class Listener:
    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)

    @contextmanager
    def task(self, what, *, total=None, unit=""):
        with SILENT.task(what) as task:
            yield task


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture(autouse=True)
def _choose_for_little_text(monkeypatch):
    monkeypatch.setattr(engine_choice, "WORTHWHILE_CHARACTERS", 1000)


class PanicException(BaseException):
    """What a Rust panic is called in each package."""


def test_gigatoken_is_chosen_and_reported(listener):
    tokenizer = tokenizer_of("gpt2")
    chosen = choose_engine(tokenizer, [*TEXTS, "a\ud800b"], listener)
    assert (chosen.engine, tokenizer.engine) == ("gigatoken", "tokenizers")
    assert chosen.digest() == tokenizer.digest()
    version = metadata.version("gigatoken")
    assert listener.said == [
        f"Encodes with gigatoken {version} (same ids as tokenizers on 0.0 MB of this text)."
    ]


def absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)


def replaced(change):
    """Return a function that changes the ids of gigatoken for a text of the corpus."""

    def apply(monkeypatch):
        original = Gigatoken.__call__

        def encode(self, text):
            return change(original(self, text)) if "fliegt über" in text else original(self, text)

        monkeypatch.setattr(Gigatoken, "__call__", encode)

    return apply


def fails(ids):
    raise PanicException("index out of bounds")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (absent, "gigatoken is not installed"),
        (replaced(lambda ids: np.append(ids, ids[:1])), "gigatoken differs at "),
        (replaced(fails), "index out of bounds"),
    ],
)
def test_a_missing_wrong_or_failing_engine_is_skipped_with_a_line(
    listener, monkeypatch, spoil, reason
):
    spoil(monkeypatch)
    chosen = choose_engine(tokenizer_of("gpt2"), TEXTS, listener)
    assert chosen.engine == "tokenizers"
    (line,) = listener.said
    assert line.startswith(f"Encodes with tokenizers {metadata.version('tokenizers')}: ")
    assert reason in line


def test_the_vocabulary_is_compared_once_and_text_of_the_corpus_always(
    listener, monkeypatch, tmp_path
):
    announced, compared = [], []
    vocabulary = engine_choice.vocabulary_texts
    monkeypatch.setattr(
        engine_choice, "vocabulary_texts", lambda one: compared.append(1) or vocabulary(one)
    )
    for cache, times in (("one", 1), ("one", 1), ("two", 2)):
        monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / cache))
        chosen = choose_engine(tokenizer_of("gpt2"), TEXTS, listener, announced.append)
        assert (chosen.engine, announced[-1].engine) == ("gigatoken", "gigatoken")
        assert len(compared) == times
    replaced(lambda ids: np.append(ids, ids[:1]))(monkeypatch)
    assert choose_engine(tokenizer_of("gpt2"), TEXTS, listener).engine == "tokenizers"
    assert len(compared) == 2


def test_a_cache_that_cannot_be_written_is_no_error(listener, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file" / "below"))
    assert choose_engine(tokenizer_of("gpt2"), TEXTS, listener).engine == "gigatoken"


def test_an_unknown_pattern_is_encoded_by_tokenizers_which_one_line_says(listener):
    assert choose_engine(tokenizer_of("tiktoken own"), TEXTS, listener).engine == "tokenizers"
    assert ["four to five times as long" in line for line in listener.said] == [True]


def test_pieces_that_no_merge_reaches_are_no_error(listener):
    odd = from_tiktoken(tiktoken_file([*pieces(), b"q!zx"]), "odd.tiktoken", engines.GPT2)
    chosen = choose_engine(odd, TEXTS, listener)
    assert chosen.encode("a q!zx the") == odd.encode("a q!zx the")
    assert len(listener.said) == 1


def test_an_interrupt_is_not_a_difference(monkeypatch):
    def stop(ids):
        raise KeyboardInterrupt

    replaced(stop)(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        choose_engine(tokenizer_of("gpt2"), TEXTS, SILENT)


def test_little_text_and_tables_need_no_choice(listener):
    assert choose_engine(tokenizer_of("byte"), TEXTS, listener).engine == "table"
    assert choose_engine(tokenizer_of("gpt2"), TEXTS[:1], listener).engine == "tokenizers"
    assert listener.said == []


@pytest.mark.parametrize(("grown", "times"), [(-(1 << 40), 90), (1 << 40, 0)])
def test_gigatoken_is_reloaded_when_the_process_has_grown(monkeypatch, grown, times):
    tokenizer, loads = tokenizer_of("gpt2"), []
    reload = Gigatoken._reload
    monkeypatch.setattr(Gigatoken, "_reload", lambda self: (loads.append(1), reload(self))[1])
    monkeypatch.setattr(engines, "GROWTH_CHECK_BYTES", 1)
    monkeypatch.setattr(engines, "MAX_GROWTH_BYTES", grown)
    fast = tokenizer.with_engine("gigatoken")
    assert [fast.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert len(loads) == 1 + times


def test_a_file_that_gigatoken_cannot_read_is_an_error():
    with pytest.raises(DataError, match="gigatoken cannot encode for this tokenizer"):
        Gigatoken("{}")


def test_the_dataset_does_not_depend_on_the_engine(tmp_path, listener, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("qwen2")))
    rows = write_rows(tmp_path / "rows.jsonl", [f"{text}<|endoftext|> " * 5 for text in TEXTS])
    options = Options(tokenizer=str(tmp_path / "tokenizer.json"), split="tail 0.2")
    made = {}
    for engine in ("gigatoken", "tokenizers"):
        if engine == "tokenizers":
            absent(monkeypatch)
        out = tmp_path / engine
        prepare_dataset([str(rows)], out, options, workers=1, progress=listener)
        made[engine] = {path.name: path.read_bytes() for path in out.iterdir()}
        assert any(f"Encodes with {engine}" in line for line in listener.said)
    assert made["gigatoken"] == made["tokenizers"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["train:300", "tokenizer.json", "folder"])
def test_the_engine_is_chosen_for_a_corpus(tmp_path, spec):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("gpt2")))
    spec = {"folder": str(tmp_path), "tokenizer.json": str(tmp_path / spec)}.get(spec, spec)
    assert make_tokenizer(spec, lambda limit: TEXTS).engine == "gigatoken"


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"added_tokens": [{"id": 1, "content": "<x>", "special": False, "lstrip": True}]},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}},
        {"model": {"type": "WordPiece", "vocab": {}}},
    ],
    ids=str,
)
def test_other_layouts_only_use_tokenizers(change):
    assert known_layout(definition("gpt2")) is not None
    assert known_layout(definition("gpt2") | change) is None
