"""The fastest correct engine is chosen. A missing, wrong or failing one is skipped and reported."""

from __future__ import annotations

import base64
import json
import random
import sys
from contextlib import contextmanager
from importlib import metadata

import numpy as np
import pytest
from engine_probes import probes
from prepared import write_rows
from texts import byte_level_json

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.tokenizers import (
    engine_choice,
    engines,
    load_tokenizer,
    make_tokenizer,
    parse_tokenizer,
)
from flatout.data.tokenizers.bpe import GPT2_PATTERN, KNOWN_FILES, RankTokenizer, train_bpe
from flatout.data.tokenizers.byte import ByteTokenizer
from flatout.data.tokenizers.byte_level import byte_level_alphabet
from flatout.data.tokenizers.engine_choice import choose_engine, difference
from flatout.errors import DataError
from flatout.progress import SILENT

pytestmark = pytest.mark.slow

TEXTS = [
    "The cat sat on the mat. It's 12345 cats!\n",
    "Ein Käfer fliegt. 日本語のテキスト 🙂\n",
    "plain words and the cat, the mat; ",
] * 30


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
def _no_verdicts_of_other_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _choose_for_little_text(monkeypatch):
    monkeypatch.setattr(engine_choice, "WORTHWHILE_CHARACTERS", 1000)


@pytest.fixture(scope="module")
def trained():
    return train_bpe(TEXTS, 330)


@pytest.fixture(scope="module")
def from_json(trained):
    """Return a tokenizer.json with the same vocabulary."""
    return parse_tokenizer(byte_level_json(TEXTS, 330), "tokenizer.json")


def wrong(monkeypatch, *, only_if: str = ""):
    """Make gigatoken return one id too many for texts that contain `only_if`."""
    original = engines._Gigatoken.__call__

    def encode(self, text):
        ids = original(self, text)
        return np.append(ids, np.uint32(1)) if only_if in text and text else ids

    monkeypatch.setattr(engines._Gigatoken, "__call__", encode)


def test_fastest_engine_is_chosen_and_reported(trained, from_json, listener):
    for tokenizer, slowest in ((trained, "tiktoken"), (from_json, "tokenizers")):
        chosen = choose_engine(tokenizer, TEXTS, listener)
        assert chosen.engine == "gigatoken"
        assert (
            listener.said.pop() == f"Encodes with gigatoken {metadata.version('gigatoken')} "
            f"(same ids as {slowest} on 0.0 MB of this text)."
        )
        assert tokenizer.engine == slowest, "choosing an engine must not change the tokenizer"


def test_the_vocabulary_is_compared_once_for_each_tokenizer(trained, from_json, monkeypatch):
    compared = []
    vocabulary = engine_choice._vocabulary
    monkeypatch.setattr(
        engine_choice,
        "_vocabulary",
        lambda each: (compared.append(each.engine), vocabulary(each))[1],
    )
    for tokenizer in (trained, from_json, trained, from_json):
        assert choose_engine(tokenizer, TEXTS, SILENT).engine == "gigatoken"
    assert compared == ["tiktoken", "tokenizers"]


def test_wrong_engine_is_detected_and_the_next_chosen(trained, from_json, listener, monkeypatch):
    wrong(monkeypatch, only_if="Käfer")
    chosen = choose_engine(from_json, TEXTS, listener)
    assert chosen.engine == "tiktoken"
    assert listener.said[0].startswith("gigatoken differs from tokenizers at ")
    assert ": encodes with tiktoken " in listener.said[0]
    assert choose_engine(trained, TEXTS, listener).engine == "tiktoken"
    assert listener.said[1].endswith(": encodes with tiktoken.")


def test_engine_that_is_wrong_only_on_this_corpus_is_detected(
    trained, listener, monkeypatch, tmp_path
):
    assert choose_engine(trained, TEXTS, listener).engine == "gigatoken"
    wrong(monkeypatch, only_if="fliegt. 日")
    assert choose_engine(trained, TEXTS, listener).engine == "tiktoken"
    assert "differs from tiktoken" in listener.said[1]


def test_engine_that_panics_is_skipped(trained, listener, monkeypatch):
    class PanicException(BaseException):
        pass

    def encode(self, text):
        if "1234" in text:
            raise PanicException("index out of bounds")
        return np.zeros(0, np.uint32)

    monkeypatch.setattr(engines._Gigatoken, "__call__", encode)
    assert choose_engine(trained, TEXTS, listener).engine == "tiktoken"
    assert "fails: index out of bounds" in listener.said[0]


def test_interrupt_is_not_a_difference(trained, monkeypatch):
    def encode(self, text):
        if text:
            raise KeyboardInterrupt
        return np.zeros(0, np.uint32)

    monkeypatch.setattr(engines._Gigatoken, "__call__", encode)
    with pytest.raises(KeyboardInterrupt):
        choose_engine(trained, TEXTS, SILENT)


@pytest.mark.parametrize("absent", [["gigatoken"], ["gigatoken", "tiktoken"]], ids="+".join)
def test_missing_engines_are_skipped_with_a_message(from_json, listener, monkeypatch, absent):
    version = metadata.version

    def of(name):
        if name in absent:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", of)
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    chosen = choose_engine(from_json, TEXTS, listener)
    assert chosen.engine == ("tokenizers" if "tiktoken" in absent else "tiktoken")
    assert listener.said[0].startswith("gigatoken is not installed")
    assert chosen.encode("The cat") == from_json.encode("The cat")


def test_an_unknown_pattern_has_one_engine(trained, listener):
    odd = RankTokenizer("odd", trained.pieces, r"\S+|\s+", trained.eot_id)
    assert choose_engine(odd, TEXTS, listener).engine == "tiktoken"
    assert listener.said == []


def test_a_vocabulary_with_gaps_has_the_same_ids(trained, listener):
    gap = RankTokenizer(
        "gap", [*trained.pieces[:-3], None, *trained.pieces[-2:]], GPT2_PATTERN, trained.eot_id
    )
    chosen = choose_engine(gap, TEXTS, listener)
    assert chosen.encode("The cat 日本") == gap.encode("The cat 日本")


def test_small_corpora_and_tokenizers_without_engines_are_unchanged(trained, listener, monkeypatch):
    assert choose_engine(ByteTokenizer(), TEXTS, listener).engine == ""
    assert choose_engine(trained, TEXTS[:1], listener).engine == "tiktoken"
    assert listener.said == []


def test_invalid_text_is_left_to_packing(trained, listener):
    assert choose_engine(trained, [*TEXTS, "a\ud800b"], listener).engine == "gigatoken"


def test_make_tokenizer_chooses_the_engine(tmp_path, trained, from_json, listener):
    path = tmp_path / "small.tiktoken"
    path.write_bytes(
        b"".join(
            base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(trained.pieces)
        )
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(from_json.definition))
    for spec in (str(path), str(tmp_path / "folder"), "train:300"):
        tokenizer = make_tokenizer(
            spec, lambda limit: TEXTS, pattern=GPT2_PATTERN, progress=listener
        )
        assert tokenizer.engine == "gigatoken"
    assert load_tokenizer(path, pattern=GPT2_PATTERN).engine == "tiktoken"


@pytest.mark.parametrize("known", KNOWN_FILES.values(), ids=lambda known: known.name)
def test_gigatoken_and_tiktoken_agree_on_every_known_pattern(known, crossing):
    slow = RankTokenizer(known.name, crossing, known.pattern, len(crossing))
    assert difference(slow.with_engine("gigatoken"), slow, probes(slow)) == ""


@pytest.fixture(scope="module")
def crossing():
    """Return pieces that cross every boundary of the pattern."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    stream = random.Random(2)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [
        "".join(stream.choices([*" \n\rabB1é日.'/", "'s", "  ", "12", "the"], k=400))
        for _ in range(20)
    ]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = byte_level_alphabet()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(byte_of[character] for character in piece) for piece, _ in by_id]


def test_pieces_that_no_merge_reaches_skip_gigatoken(trained, listener):
    """gigatoken panics on them."""
    odd = RankTokenizer("odd", [*trained.pieces, b"q!zx"], GPT2_PATTERN, trained.eot_id + 1)
    assert choose_engine(odd, TEXTS, listener).engine == "tiktoken"


def test_probes_are_deterministic(trained):
    assert list(probes(trained)) == list(probes(trained))


@pytest.mark.parametrize(("grown", "times"), [(-(1 << 40), len(TEXTS)), (1 << 40, 0)])
def test_gigatoken_is_reloaded_when_the_process_has_grown(trained, monkeypatch, grown, times):
    monkeypatch.setattr(engines, "GROWTH_CHECK_BYTES", 1)
    monkeypatch.setattr(engines, "MAX_GROWTH_BYTES", grown)
    fast = trained.with_engine("gigatoken")
    load, loaded = fast.encoder._load, []
    fast.encoder._load = lambda: loaded.append(1) or load()
    for text in TEXTS:
        assert fast.encode(text) == trained.encode(text)
    assert len(loaded) == times


def test_fallback_encodes_what_the_engine_cannot_split():
    def fails(text):
        if "x" in text:
            raise ValueError("stack")
        return text.encode() and np.array([1], np.uint32)

    either = engines.with_fallback(fails, lambda text: np.array([2], np.uint32))
    assert either("a").tolist() == [1]
    assert either("x").tolist() == [2]
    with pytest.raises(UnicodeEncodeError):
        either("\ud800")


def test_unreadable_definition_is_rejected():
    with pytest.raises(DataError, match="gigatoken cannot encode"):
        engines.gigatoken_of_json({"model": {}})


def test_dataset_does_not_depend_on_the_engine(tmp_path, from_json, listener, monkeypatch):
    texts = (f"{number} {TEXTS[number % len(TEXTS)]}<|endoftext|>" for number in range(300))
    text = write_rows(tmp_path / "text.jsonl", texts)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(from_json.definition), encoding="utf-8")
    options = Options(tokenizer=str(path))

    def prepared(name):
        out = prepare_dataset(
            [str(text)], tmp_path / name, options, workers=1, progress=listener
        ).path
        return {file.name: file.read_bytes() for file in out.iterdir()}

    fast = prepared("fast")
    wrong(monkeypatch)
    middle = prepared("middle")
    monkeypatch.setattr(engine_choice, "WORTHWHILE_CHARACTERS", 10**9)
    slow = prepared("slow")
    used = [
        line.split(" (")[0].rpartition("ncodes with ")[2].split()[0]
        for line in listener.said
        if "ncodes with" in line
    ]
    assert used == ["gigatoken", "tiktoken"]
    assert fast == middle == slow
