import base64
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from texts import CORPUS, STRANGE, byte_level_json

from flatout.data.prepare.request.request import tokenizer_mark
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
    """Write a byte-level BPE in the layout of GPT-2's tokenizer.json."""
    path.write_text(byte_level_json(CORPUS, 320, end_of_text, special=special))
    return path


@pytest.fixture(params=["char", "byte", "train:300", "huggingface", "tiktoken"])
def tokenizer(request, tmp_path):
    """Return a tokenizer of each kind."""
    if request.param == "huggingface":
        return load_tokenizer(huggingface_file(tmp_path / "tokenizer.json"))
    if request.param == "tiktoken":
        return load_tokenizer(tiktoken_file(tmp_path / "small.tiktoken"), pattern=GPT2_PATTERN)
    strange = ["".join(STRANGE + LITERALS)] if request.param == "char" else []
    return make_tokenizer(request.param, lambda limit: CORPUS + strange)


def test_decoding_restores_text(tokenizer):
    for text in CORPUS + STRANGE + LITERALS:
        pieces = list(tokenizer.encode_stream([text]))
        assert {ids.dtype for ids in pieces} == {np.dtype(np.uint32)}
        ids = np.concatenate(pieces)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids.tolist()) == text.encode()
        assert tokenizer.encode(text) == ids.tolist()


def test_decoding_restores_random_text(tokenizer):
    stream = random.Random(0)
    alphabet = "".join(CORPUS + STRANGE + LITERALS)
    for _ in range(100):
        text = "".join(stream.choice(alphabet) for _ in range(stream.randrange(60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_is_never_encoded_as_end_of_text(tokenizer):
    for text in LITERALS:
        ids = tokenizer.encode(text)
        assert tokenizer.eot_id not in ids
        assert max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"


def test_saves_to_one_file_that_loads_as_an_equal_tokenizer(tokenizer, tmp_path):
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


def test_half_a_surrogate_pair_is_rejected(tokenizer):
    with pytest.raises(DataError, match=r"U\+D800"):
        tokenizer.encode("ok \ud800")


def test_invalid_bytes_and_ids_decode_to_the_replacement_character(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size + 5]) in ("\ufffd", "")
    ids = tokenizer.encode("🙂")
    if len(ids) > 1:
        assert tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
def test_encoding_in_pieces_gives_the_same_ids(tokenizer, monkeypatch, size):
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


def test_characters_are_numbered_in_order_before_end_of_text():
    tokenizer = make_tokenizer("char", lambda limit: ["banana", "cab!"])
    assert tokenizer.encode("!abcn") == [0, 1, 2, 3, 4]
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (6, 5)


@pytest.mark.parametrize("text", ["abd", "ab~", "ab\U0010ffff", "ab "])
def test_error_names_the_position_of_an_unknown_character(text):
    tokenizer = make_tokenizer("char", lambda limit: ["abce"])
    with pytest.raises(DataError, match="Character 2,"):
        tokenizer.encode(text)


def test_char_reads_the_whole_corpus_and_training_a_bounded_sample():
    searched = []

    def sample(limit):
        searched.append(limit)
        return CORPUS

    make_tokenizer("char", sample)
    make_tokenizer("train:260", sample)
    assert searched[0] is None
    assert 1_000_000 <= searched[1] <= 50_000_000


def test_training_reports_a_smaller_vocabulary_than_requested():
    message = []

    class Listener:
        def say(self, line):
            message.append(line)

        def task(self, what, *, total=None, unit=""):
            from flatout.progress import SILENT

            return SILENT.task(what)

    tokenizer = make_tokenizer("train:4096", lambda limit: ["abab"], progress=Listener())
    assert tokenizer.vocab_size < 300
    assert "not 4,096" in message[0]


@pytest.mark.parametrize(
    "spec", ["train:", "train:x", "train:257", "train:-5", "train:1e4", "train:99999999"]
)
def test_invalid_vocabulary_size_is_rejected(spec):
    with pytest.raises(DataError, match="does not name a vocabulary size"):
        make_tokenizer(spec, give)


@pytest.mark.parametrize("spec", ["char", "train:300"])
@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_empty_corpus_is_rejected(spec, texts):
    with pytest.raises(DataError, match="corpus is empty"):
        make_tokenizer(spec, lambda limit: texts)


def test_error_suggests_the_nearest_name():
    with pytest.raises(DataError, match="Did you mean 'char'"):
        make_tokenizer("cahr", give)


def test_error_suggests_the_nearest_file(tmp_path):
    huggingface_file(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"Did you mean '.*/tokenizer\.json'"):
        make_tokenizer(str(tmp_path / "tokeniser.json"), give)
    assert (
        make_tokenizer(str(tmp_path), give).vocab_size
        == load_tokenizer(tmp_path / "tokenizer.json").vocab_size
    )


def test_unknown_tiktoken_file_requires_a_pattern(tmp_path):
    path = tiktoken_file(tmp_path / "mine.tiktoken")
    with pytest.raises(DataError, match="--pattern"):
        load_tokenizer(path)
    tokenizer = load_tokenizer(path, pattern=r"\S+|\s+")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("mine", 263, 262)
    assert tokenizer.encode("the") == [258]


def test_published_tiktoken_file_needs_no_pattern(tmp_path, monkeypatch):
    import hashlib

    data = tiktoken_file(tmp_path / "known.tiktoken").read_bytes()
    monkeypatch.setitem(
        KNOWN_FILES, hashlib.sha256(data).hexdigest(), KnownFile("known", GPT2_PATTERN, 300)
    )
    tokenizer = load_tokenizer(tmp_path / "known.tiktoken")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("known", 301, 300)
    assert tokenizer.decode([299]) == "\ufffd"


@pytest.mark.parametrize("content", [b"", b"YQ== 0\n"])
def test_tiktoken_file_without_all_bytes_is_rejected(tmp_path, content):
    (tmp_path / "a.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match="of the 256 single bytes"):
        load_tokenizer(tmp_path / "a.tiktoken", pattern=GPT2_PATTERN)


def test_unusual_end_of_text_must_be_named(tmp_path):
    path = huggingface_file(tmp_path / "tokenizer.json", end_of_text="<fin>")
    with pytest.raises(DataError, match="--end-of-text"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="Did you mean '<fin>'"):
        load_tokenizer(path, end_of_text="<fim>")
    tokenizer = load_tokenizer(path, end_of_text="<fin>")
    assert tokenizer.eot_id not in tokenizer.encode("a<fin>b")
    assert tokenizer.decode(tokenizer.encode("a<fin>b")) == "a<fin>b"


def test_end_of_text_is_special_even_if_the_file_does_not_say_so(tmp_path):
    tokenizer = load_tokenizer(huggingface_file(tmp_path / "tokenizer.json", special=False))
    assert tokenizer.eot_id not in tokenizer.encode("a<|endoftext|>b")


def test_unigram_model_never_encodes_text_as_a_special_token(tmp_path):
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
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eot_id == 1
    assert tokenizer.encode("a</s></s>a") == [6, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert tokenizer.decode([6, 2, 3]) == "a</"
    assert tokenizer.encode("az") == [6, 0], "text may be encoded as the unknown token"


def test_post_processing_truncation_and_padding_are_ignored(tmp_path):
    from tokenizers import Tokenizer, processors

    path = huggingface_file(tmp_path / "tokenizer.json")
    plain = load_tokenizer(path).encode("The cat said 12")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))],
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=40)
    path.write_text(tokenizer.to_str())
    assert load_tokenizer(path).encode("The cat said 12") == plain
    assert len(plain) > 2


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
def test_file_without_a_tokenizer_is_rejected(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_newer_format_is_rejected():
    document = {"format": "flatout-tokenizer", "format_version": 99, "kind": "byte"}
    with pytest.raises(DataError, match=r"99.*newer flatout"):
        parse_tokenizer(json.dumps(document), "x.json")


@pytest.mark.parametrize("chunk", [1, 7, 100, 10_000])
def test_encoding_chunks_gives_the_same_ids(tokenizer, monkeypatch, chunk):
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


def test_small_chunks_do_not_repeat_the_search_for_a_cut(monkeypatch):
    """Where text cannot be cut, a new chunk must not repeat the search of all pending text."""
    tokenizer = train_bpe(CORPUS, 260)
    searched = []
    monkeypatch.setattr(
        type(tokenizer), "next_cut", lambda self, text, start, end: searched.append(len(text))
    )
    monkeypatch.setattr(base, "PIECE_CHARACTERS", 1000)
    (ids,) = tokenizer.encode_stream("a" for _ in range(20_000))
    assert len(ids) == len(tokenizer.encode("a" * 20_000))
    assert len(searched) < 50


def test_directory_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(
        DataError,
        match=rf"The directory {tmp_path} has no tokenizer\.json\. "
        "Fix: Name a directory that has one",
    ):
        make_tokenizer(str(tmp_path), give)
    tiktoken_file(tmp_path / "own.tiktoken")
    with pytest.raises(DataError, match=r"Name the file: '.*own\.tiktoken'\."):
        make_tokenizer(str(tmp_path), give)


def test_file_without_read_permission_is_rejected(tmp_path, monkeypatch):
    path = huggingface_file(tmp_path / "tokenizer.json")

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", closed)
    for call in (lambda: make_tokenizer(str(path), give), lambda: tokenizer_mark(str(path))):
        with pytest.raises(
            DataError, match=r"Cannot read the tokenizer .*tokenizer\.json: Permission denied\."
        ):
            call()
