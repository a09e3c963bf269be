"""Tokenizers from text, from numbers, and from .tiktoken files."""

import hashlib

import pytest
from some_tokenizers import SPELLED, pieces, tiktoken_file, tokenizer_of
from texts import CORPUS
from tokenizers import pre_tokenizers

from flatout.data.tokenizers import load_tokenizer, make, make_tokenizer
from flatout.data.tokenizers.engines import GPT2, byte_level_alphabet
from flatout.data.tokenizers.make import KNOWN_FILES, from_tiktoken
from flatout.errors import DataError
from flatout.progress import SILENT

BYTES = [bytes([value]) for value in range(256)]


def give(limit):
    return iter(CORPUS)


def test_characters_are_numbered_in_order_before_end_of_text():
    tokenizer = make_tokenizer("char", lambda limit: ["cab", "\ud800b\n"])
    assert tokenizer.encode("\nabc") == [0, 1, 2, 3]
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("char", 5, 4)


def test_training_is_deterministic_and_gives_the_requested_size():
    texts = [f"word{n % 97} other{n % 31} " for n in range(2000)]
    first, again = (make_tokenizer("train:330", lambda limit: texts) for _ in range(2))
    assert (first.name, first.vocab_size, first.eot_id) == ("bpe-330", 330, 329)
    assert first.digest() == again.digest()
    assert first.decode([0, 1, 2]) == '!"#'
    assert len(first.encode("word96 other1")) < 8


def test_training_splits_long_texts_where_the_pattern_does(monkeypatch):
    text = "".join(CORPUS) * 40
    whole = make_tokenizer("train:330", lambda limit: [text])
    monkeypatch.setattr(make, "TRAINING_PIECE_CHARACTERS", 50)
    assert make_tokenizer("train:330", lambda limit: [text]).digest() == whole.digest()


def test_char_reads_the_whole_corpus_and_training_a_bounded_sample():
    asked = []
    for spec in ("char", "train:260"):
        make_tokenizer(spec, lambda limit: asked.append(limit) or CORPUS)
    assert asked[0] is None
    assert 1_000_000 <= asked[1] <= 50_000_000


def test_training_reports_a_smaller_vocabulary_than_requested():
    said = []

    class Listener:
        task = SILENT.task
        say = staticmethod(said.append)

    tokenizer = make_tokenizer("train:4096", lambda limit: ["abab"], progress=Listener())
    assert tokenizer.vocab_size < 300
    assert "not 4,096" in said[0]


@pytest.mark.parametrize(
    ("spec", "texts", "wanted"),
    [
        *(
            (f"train:{size}", CORPUS, "does not name a vocabulary size")
            for size in ("", "x", "257")
        ),
        *((f"train:{size}", CORPUS, "does not name a") for size in ("-5", "1e4", "99999999")),
        *((spec, [], "corpus is empty") for spec in ("char", "train:300")),
        *((spec, ["", ""], "corpus is empty") for spec in ("char", "train:300")),
        *((f"ids:{n}", [], "does not contain a number of ids") for n in ("", "x", "1", "5:5")),
        *((f"ids:{n}", [], "does not contain a number") for n in ("99999999999", "-3")),
    ],
)
def test_what_cannot_be_made_is_rejected(spec, texts, wanted):
    with pytest.raises(DataError, match=wanted):
        make_tokenizer(spec, lambda limit: texts)


def test_ids_without_text_are_numbers(tmp_path):
    last, named = (make_tokenizer(spec, give) for spec in ("ids:300", "ids:300:7"))
    assert [each.eot_id for each in (last, named)] == [299, 7]
    assert not last.has_text
    assert last.encode("0 5  298\n") == [0, 5, 298]
    assert last.decode([5, 298]) == "5 298"
    named.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").eot_id == 7
    for text in ("300", "299", "-1", "a", "1,2", "1" * 30):
        with pytest.raises(DataError, match="it has no text, only ids separated by spaces"):
            last.encode(text)


def test_a_tiktoken_file_has_the_ids_of_its_lines(tmp_path):
    merges = [b"th", b"he", b"the", b"in", b" t", b" the"]
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(tiktoken_file([*BYTES, *merges]))
    with pytest.raises(DataError, match="--pattern"):
        load_tokenizer(path)
    tokenizer = load_tokenizer(path, pattern=r"\S+|\s+")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (263, 262)
    assert tokenizer.encode("the") == [258]
    assert tokenizer.encode("then in") == [258, 110, 32, 259]
    assert load_tokenizer(path, pattern=GPT2).encode("in the") == [259, 261]


def test_a_tiktoken_file_is_converted_once_for_each_pattern(tmp_path, monkeypatch):
    path, made = tmp_path / "mine.tiktoken", []
    path.write_bytes(tiktoken_file([*BYTES, b"th", b"the"]))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    convert = make.from_tiktoken
    monkeypatch.setattr(make, "from_tiktoken", lambda *given: made.append(given) or convert(*given))
    first, again, other = (
        load_tokenizer(path, pattern=each) for each in (r"\S+|\s+",) * 2 + (GPT2,)
    )
    assert len(made) == 2
    assert first.digest() == again.digest() != other.digest()
    assert again.encode("the thing") == first.encode("the thing") == [257, 32, 256, 105, 110, 103]
    for kept in (tmp_path / "cache").rglob("*.json"):  # a damaged copy is made again
        kept.write_bytes(kept.read_bytes()[:-1])
    assert load_tokenizer(path, pattern=GPT2).digest() == other.digest()
    assert len(made) == 3
    path.write_bytes(tiktoken_file([*BYTES, b"in"]))
    assert load_tokenizer(path, pattern=GPT2).encode("in") == [256]
    with pytest.raises(DataError, match="--pattern"):
        load_tokenizer(path)


def test_a_published_tiktoken_file_needs_no_pattern_and_may_have_gaps(monkeypatch):
    content = tiktoken_file(pieces())
    monkeypatch.setitem(KNOWN_FILES, hashlib.sha256(content).hexdigest(), (GPT2, 1000))
    tokenizer = from_tiktoken(content, "known.tiktoken")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (1001, 1000)
    assert tokenizer.decode([999]) == "\ufffd"
    assert tokenizer.decode([1000]) == "<|endoftext|>"
    assert tokenizer.encode("the 12") == tokenizer_of("tiktoken gpt2").encode("the 12")


def test_patterns_of_tiktoken_split_as_in_tiktoken():
    """Their dialects differ at the end of a text and of a run of digits."""
    text = "it'LL 1234567 \n\n  x\n  "
    words = {
        "tiktoken gpt2": ["it", "'", "LL", " 1234567", " \n\n ", " x", "\n  "],
        "tiktoken cl100k": ["it", "'LL", " ", "123", "456", "7", " \n\n", " ", " x", "\n  "],
        "tiktoken o200k": ["it'LL", " ", "123", "456", "7", " \n\n", " ", " x", "\n", "  "],
    }
    for kind, expected in words.items():
        made = from_tiktoken(
            tiktoken_file(list(dict.fromkeys([*BYTES, *map(str.encode, expected)]))),
            "x.tiktoken",
            SPELLED[kind],
        )
        assert [made.decode([index]) for index in made.encode(text)] == expected


@pytest.mark.parametrize(
    ("more", "pattern", "message"),
    [
        (b"YWI= 1099511627776\n", GPT2, "the rank 1,099,511,627,776 is not between 0 and 16,777"),
        (b"YWI= -1\n", GPT2, "line 257: the rank -1 is not between"),
        (b"YWI= 9\n", GPT2, "line 257: the rank 9 appears twice"),
        (b"YW!= 256\n", GPT2, "line 257 is not `BASE64 RANK`"),
        (b"YWI= " + b"9" * 5000, GPT2, "line 257 is not `BASE64 RANK`"),
        (b"YWI= 16777215\n", GPT2, "Ids must be below 16,777,216"),
        (b"", "", "--pattern must not be empty"),
        (b"", "(", r"The pattern of the tokenizer .*own\.tiktoken cannot be used: .* --pattern"),
    ],
)
def test_a_damaged_tiktoken_file_or_pattern_is_named(tmp_path, more, pattern, message):
    (tmp_path / "own.tiktoken").write_bytes(tiktoken_file(BYTES) + more)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "own.tiktoken", pattern=pattern)


@pytest.mark.parametrize("content", [b"", b"YQ== 0\n"])
def test_a_tiktoken_file_without_all_bytes_is_rejected(content):
    with pytest.raises(DataError, match="of the 256 single bytes"):
        from_tiktoken(content, "a.tiktoken", GPT2)


def test_the_byte_level_alphabet_is_that_of_tokenizers():
    ours = byte_level_alphabet()
    assert set(ours) == set(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for value in range(128):
        ((piece, _),) = split.pre_tokenize_str(chr(value))
        assert ours[piece] == value
