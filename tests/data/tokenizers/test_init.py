import base64
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from texts import CORPUS, STRANGE

from flatout.data.prepare.request.identity import tokenizer_mark
from flatout.data.tokenizers import base, load_tokenizer, make_tokenizer, parse_tokenizer
from flatout.data.tokenizers.bpe import GPT2_PATTERN, KNOWN_FILES, KnownFile, train_bpe
from flatout.errors import DataError

LITERALS = ["<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "</s>", "<eos>[EOS]<|im_end|>"]


def give(limit):
    return iter(CORPUS)


def tiktoken_file(path: Path, merges=("th", "he", "the", "in", " t", " the")) -> Path:
    pieces = [bytes([value]) for value in range(256)] + [merge.encode() for merge in merges]
    path.write_bytes(
        b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))
    )
    return path


def huggingface_file(path: Path, end_of_text="<|endoftext|>", special=True) -> Path:
    """A byte-level BPE in the layout of GPT-2's tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken(end_of_text, special=special, normalized=False)])
    path.write_text(made.to_str(), encoding="utf-8")
    return path


@pytest.fixture(params=["char", "byte", "train:300", "huggingface", "tiktoken"])
def tokenizer(request, tmp_path):
    """One of each kind."""
    if request.param == "huggingface":
        return load_tokenizer(huggingface_file(tmp_path / "tokenizer.json"))
    if request.param == "tiktoken":
        return load_tokenizer(tiktoken_file(tmp_path / "small.tiktoken"), pattern=GPT2_PATTERN)
    strange = ["".join(STRANGE + LITERALS)] if request.param == "char" else []
    return make_tokenizer(request.param, lambda limit: CORPUS + strange)


def test_text_comes_back_exactly(tokenizer):
    for text in CORPUS + STRANGE + LITERALS:
        pieces = list(tokenizer.encode_stream([text]))
        assert {ids.dtype for ids in pieces} == {np.dtype(np.uint32)}
        ids = np.concatenate(pieces)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids.tolist()) == text.encode()
        assert tokenizer.encode(text) == ids.tolist()


def test_random_text_comes_back_exactly(tokenizer):
    stream = random.Random(0)
    alphabet = "".join(CORPUS + STRANGE + LITERALS)
    for _ in range(100):
        text = "".join(stream.choice(alphabet) for _ in range(stream.randrange(60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_never_becomes_end_of_text(tokenizer):
    for text in LITERALS:
        ids = tokenizer.encode(text)
        assert tokenizer.eot_id not in ids
        assert max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"


def test_it_saves_to_one_file_and_loads_back_equal(tokenizer, tmp_path):
    (tmp_path / "alone").mkdir()
    path = tmp_path / "alone" / "tokenizer.json"
    tokenizer.save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]
    loaded = load_tokenizer(path)
    for text in CORPUS + STRANGE + LITERALS:
        assert loaded.encode(text) == tokenizer.encode(text)
    for name in ("name", "vocab_size", "eot_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.digest() == tokenizer.digest() == load_tokenizer(path).digest()
    travelled = pickle.loads(pickle.dumps(tokenizer))
    assert travelled.digest() == tokenizer.digest()


def test_the_digest_is_that_of_the_file(tokenizer, tmp_path):
    import hashlib

    tokenizer.save(tmp_path / "x.json")
    assert hashlib.sha256((tmp_path / "x.json").read_bytes()).hexdigest() == tokenizer.digest()


def test_half_a_surrogate_pair_is_a_clean_error(tokenizer):
    with pytest.raises(DataError, match=r"U\+D800"):
        tokenizer.encode("ok \ud800")


def test_bytes_that_are_no_text_and_ids_that_are_none_decode_to_the_replacement_character(
    tokenizer,
):
    assert tokenizer.decode([tokenizer.vocab_size + 5]) in ("\ufffd", "")
    ids = tokenizer.encode("🙂")
    if len(ids) > 1:
        assert tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
def test_a_long_text_in_pieces_has_the_same_ids(tokenizer, monkeypatch, size):
    text = "".join(CORPUS + STRANGE + LITERALS + ["one\n two\n\nthree.\n\t4\n5\r\n six \n"] * 3)
    if tokenizer.name == "char":
        text = "".join(CORPUS * 15)
    whole = tokenizer.encode(text)
    monkeypatch.setattr(base, "PIECE_CHARACTERS", size)
    pieces = list(tokenizer.encode_stream([text]))
    assert np.concatenate(pieces).tolist() == whole == tokenizer.encode(text)
    if type(tokenizer).__name__ != "HuggingFaceTokenizer":
        assert len(pieces) > (1 if size > 100 else 5)
    with pytest.raises(DataError, match=f"Character {len(text)}"):
        tokenizer.encode(text + "\ud800")


def test_characters_are_numbered_in_order_and_end_of_text_is_last():
    made = make_tokenizer("char", lambda limit: ["banana", "cab!"])
    assert made.encode("!abcn") == [0, 1, 2, 3, 4]
    assert (made.vocab_size, made.eot_id) == (6, 5)


@pytest.mark.parametrize("text", ["abd", "ab~", "ab\U0010ffff", "ab "])
def test_a_character_outside_the_vocabulary_is_named_with_its_place(text):
    made = make_tokenizer("char", lambda limit: ["abce"])
    with pytest.raises(DataError, match="Character 2,"):
        made.encode(text)


def test_characters_ask_for_the_whole_corpus_and_training_for_a_bounded_sample():
    asked = []

    def sample(limit):
        asked.append(limit)
        return CORPUS

    make_tokenizer("char", sample)
    make_tokenizer("train:260", sample)
    assert asked[0] is None
    assert 1_000_000 <= asked[1] <= 50_000_000


def test_a_corpus_too_small_for_the_vocabulary_gives_a_smaller_one_aloud():
    said = []

    class Listener:
        def say(self, line):
            said.append(line)

        def task(self, what, *, total=None, unit=""):
            from flatout.progress import SILENT

            return SILENT.task(what)

    made = make_tokenizer("train:4096", lambda limit: ["abab"], progress=Listener())
    assert made.vocab_size < 300
    assert "not 4,096" in said[0]


@pytest.mark.parametrize(
    "spec", ["train:", "train:x", "train:257", "train:-5", "train:1e4", "train:99999999"]
)
def test_a_vocabulary_size_that_is_none_is_refused(spec):
    with pytest.raises(DataError, match="does not name a vocabulary size"):
        make_tokenizer(spec, give)


@pytest.mark.parametrize("spec", ["char", "train:300"])
@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_an_empty_corpus_is_said(spec, texts):
    with pytest.raises(DataError, match="corpus is empty"):
        make_tokenizer(spec, lambda limit: texts)


def test_a_mistyped_name_is_answered_with_the_nearest():
    with pytest.raises(DataError, match="Did you mean 'char'"):
        make_tokenizer("cahr", give)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    huggingface_file(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"Did you mean '.*/tokenizer\.json'"):
        make_tokenizer(str(tmp_path / "tokeniser.json"), give)
    assert (
        make_tokenizer(str(tmp_path), give).vocab_size
        == load_tokenizer(tmp_path / "tokenizer.json").vocab_size
    )


def test_an_unknown_tiktoken_file_asks_for_its_pattern(tmp_path):
    path = tiktoken_file(tmp_path / "mine.tiktoken")
    with pytest.raises(DataError, match="--pattern"):
        load_tokenizer(path)
    made = load_tokenizer(path, pattern=r"\S+|\s+")
    assert (made.name, made.vocab_size, made.eot_id) == ("mine", 263, 262)
    assert made.encode("the") == [258]


def test_a_known_tiktoken_file_needs_none(tmp_path, monkeypatch):
    import hashlib

    data = tiktoken_file(tmp_path / "known.tiktoken").read_bytes()
    monkeypatch.setitem(
        KNOWN_FILES, hashlib.sha256(data).hexdigest(), KnownFile("known", GPT2_PATTERN, 300)
    )
    made = load_tokenizer(tmp_path / "known.tiktoken")
    assert (made.name, made.vocab_size, made.eot_id) == ("known", 301, 300)
    assert made.decode([299]) == "\ufffd"


@pytest.mark.parametrize("line", [b"notbase64! 5", b"YQ==", b"YQ== x", b"YQ== 1 2"])
def test_a_damaged_tiktoken_file_names_the_line(tmp_path, line):
    path = tiktoken_file(tmp_path / "a.tiktoken")
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(DataError, match="line 263"):
        load_tokenizer(path, pattern=GPT2_PATTERN)


@pytest.mark.parametrize("content", [b"", b"YQ== 0\n"])
def test_a_tiktoken_file_that_lacks_bytes_is_refused(tmp_path, content):
    (tmp_path / "a.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match="of the 256 single bytes"):
        load_tokenizer(tmp_path / "a.tiktoken", pattern=GPT2_PATTERN)


def test_end_of_text_of_an_unusual_name_is_asked_for(tmp_path):
    path = huggingface_file(tmp_path / "tokenizer.json", end_of_text="<fin>")
    with pytest.raises(DataError, match="--end-of-text"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="Did you mean '<fin>'"):
        load_tokenizer(path, end_of_text="<fim>")
    made = load_tokenizer(path, end_of_text="<fin>")
    assert made.eot_id not in made.encode("a<fin>b")
    assert made.decode(made.encode("a<fin>b")) == "a<fin>b"


def test_end_of_text_that_the_file_does_not_call_special_is_special_here(tmp_path):
    made = load_tokenizer(huggingface_file(tmp_path / "tokenizer.json", special=False))
    assert made.eot_id not in made.encode("a<|endoftext|>b")


def test_a_special_token_among_the_pieces_of_a_unigram_model_is_not_reached_by_text(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    scores = [
        ("<unk>", -1.0),
        ("</s>", 0.0),
        ("<", -2.0),
        ("/", -2.0),
        ("s", -2.0),
        (">", -2.0),
        ("a", -2.0),
    ]
    made = Tokenizer(models.Unigram(scores, unk_id=0))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<unk>", "</s>"])
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eot_id == 1
    assert tokenizer.encode("a</s></s>a") == [6, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert tokenizer.decode([6, 2, 3]) == "a</"
    assert tokenizer.encode("az") == [6, 0], "what is unknown may still be said to be unknown"


def test_what_a_tokenizer_file_adds_around_a_text_is_left_off(tmp_path):
    from tokenizers import Tokenizer, processors

    path = huggingface_file(tmp_path / "tokenizer.json")
    plain = load_tokenizer(path).encode("The cat said 12")
    made = Tokenizer.from_file(str(path))
    made.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        special_tokens=[("<|endoftext|>", made.token_to_id("<|endoftext|>"))],
    )
    made.enable_truncation(2)
    made.enable_padding(length=40)
    path.write_text(made.to_str())
    assert load_tokenizer(path).encode("The cat said 12") == plain
    assert len(plain) > 2


def test_a_tokenizer_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*: Is a directory"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": 3}',
        '"text"',
        '{"format": "flatout-tokenizer", "format_version": 1, "kind": "char"}',
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_newer_format_is_refused():
    document = {"format": "flatout-tokenizer", "format_version": 99, "kind": "byte"}
    with pytest.raises(DataError, match=r"99.*newer flatout"):
        parse_tokenizer(json.dumps(document), "x.json")


@pytest.mark.parametrize("chunk", [1, 7, 100, 10_000])
def test_a_text_that_comes_in_chunks_has_the_same_ids(tokenizer, monkeypatch, chunk):
    text = "".join(CORPUS * 5)
    whole = tokenizer.encode(text)
    monkeypatch.setattr(base, "PIECE_CHARACTERS", 50)
    chunks = [text[start : start + chunk] for start in range(0, len(text), chunk)]
    pieces = list(tokenizer.encode_stream(iter(chunks)))
    assert np.concatenate(pieces).tolist() == whole
    assert len(pieces) > 2
    assert [ids.tolist() for ids in tokenizer.encode_stream([])] == [[]]
    with pytest.raises(DataError, match=f"Character {len(text)} "):
        list(tokenizer.encode_stream([*chunks, "\udc00"]))


def test_a_long_text_is_looked_through_once_however_small_its_chunks(monkeypatch):
    """Where nothing can be cut, each new chunk must not mean another look at all that waits."""
    made = train_bpe(CORPUS, 260)
    asked = []
    monkeypatch.setattr(
        type(made), "next_cut", lambda self, text, place, end: asked.append(len(text))
    )
    monkeypatch.setattr(base, "PIECE_CHARACTERS", 1000)
    (ids,) = made.encode_stream("a" for _ in range(20_000))
    assert len(ids) == len(made.encode("a" * 20_000))
    assert len(asked) < 50


def test_a_folder_without_a_tokenizer_is_said(tmp_path):
    with pytest.raises(
        DataError,
        match=rf"The directory {tmp_path} has no tokenizer\.json\. Fix: Name a directory that has one",
    ):
        make_tokenizer(str(tmp_path), give)
    tiktoken_file(tmp_path / "own.tiktoken")
    with pytest.raises(DataError, match=r"Name the file: '.*own\.tiktoken'\."):
        make_tokenizer(str(tmp_path), give)


def test_a_file_that_may_not_be_read_is_said(tmp_path, monkeypatch):
    path = huggingface_file(tmp_path / "tokenizer.json")

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", closed)
    for call in (lambda: make_tokenizer(str(path), give), lambda: tokenizer_mark(str(path))):
        with pytest.raises(
            DataError, match=r"Cannot read the tokenizer .*tokenizer\.json: Permission denied\."
        ):
            call()
