"""Damaged and harmful tokenizer files give an error that names the file."""

import base64
import json
import os

import pytest

from flatout.data.tokenizers import load_tokenizer
from flatout.data.tokenizers.base import NotEncodable
from flatout.data.tokenizers.bpe import GPT2_PATTERN, RankTokenizer
from flatout.errors import DataError

VOCABULARY = {"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3}
END = {
    "id": 1,
    "content": "<|endoftext|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
BYTES = [bytes([value]) for value in range(256)]


def definition(**parts):
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": VOCABULARY, "merges": []}
    return {
        "version": "1.0",
        "added_tokens": [END],
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": None,
        "model": model,
    } | parts


def hub_file(tmp_path, **parts):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition(**parts)))
    return tmp_path / "tokenizer.json"


def tiktoken_file(tmp_path, more=b""):
    path = tmp_path / "own.tiktoken"
    path.write_bytes(
        b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(BYTES))
        + more
    )
    return path


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            b"YWI= 1099511627776\n",
            "line 257: the rank 1,099,511,627,776 is not between 0 and 16,777,215",
        ),
        (b"YWI= -1\n", "line 257: the rank -1 is not between"),
        (b"YWI= 9\n", "line 257: the rank 9 appears twice"),
        (b"YW!= 256\n", "line 257 is not `BASE64 RANK`"),
        (b"YWI= " + b"9" * 5000, "line 257 is not `BASE64 RANK`"),
    ],
    ids=["large", "negative", "twice", "base64", "digits"],
)
def test_error_names_an_invalid_rank(tmp_path, more, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(tiktoken_file(tmp_path, more), pattern=GPT2_PATTERN)


def test_error_names_an_id_that_is_too_large(tmp_path):
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "vocab": VOCABULARY | {"z": 2**32 - 2},
        "merges": [],
    }
    with pytest.raises(DataError, match=r"has the id 4,294,967,294\. Ids must be below 16,777,216"):
        load_tokenizer(hub_file(tmp_path, model=model))
    with pytest.raises(DataError, match="Ids must be below"):
        RankTokenizer("x", BYTES, GPT2_PATTERN, 2**40)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"\w+", "omits text"),
        ("(", "The pattern of the tokenizer 'own' cannot be used: .* Correct --pattern"),
        ("a*", "cannot be used: .* Correct --pattern"),
        ("(a|a)*", "The tokenizer 'own' fails: "),
    ],
)
def test_pattern_that_does_not_split_text_is_rejected(tmp_path, pattern, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(tiktoken_file(tmp_path), pattern=pattern)


@pytest.mark.parametrize("pattern", [r"\s?\S+|\s+", r"[\s\S]"])
def test_patterns_that_split_all_text_pass(tmp_path, pattern):
    text = "An été.\n\n  日本"
    tokenizer = load_tokenizer(tiktoken_file(tmp_path), pattern=pattern)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_empty_pattern_is_rejected(tmp_path):
    with pytest.raises(DataError, match="--pattern must not be empty"):
        load_tokenizer(tiktoken_file(tmp_path), pattern="")


def test_a_saved_file_that_the_engine_cannot_load_is_damaged(tmp_path):
    head = {"format": "flatout-tokenizer", "format_version": 1, "kind": "huggingface"}
    broken = {"name": "x", "eot_id": 1, "tokenizer": definition(normalizer={"type": "Unknown"})}
    (tmp_path / "saved.json").write_text(json.dumps(head | broken))
    with pytest.raises(DataError, match=r"saved\.json is a damaged tokenizer file"):
        load_tokenizer(tmp_path / "saved.json")


def test_engine_failure_is_a_bad_row(tmp_path):
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "nothing"}
    with pytest.raises(
        NotEncodable,
        match=r"The tokenizer 'tokenizer' fails: WordLevel error: Missing \[UNK\] token",
    ):
        load_tokenizer(hub_file(tmp_path, model=model)).encode("c")
    broken = load_tokenizer(hub_file(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(
        NotEncodable, match="The tokenizer 'tokenizer' fails: chunk size must be non-zero"
    ):
        broken.encode("a")


@pytest.mark.parametrize("kind", ["fifo", "large"])
def test_special_and_large_files_are_not_read(tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(
        DataError, match="is not a regular file" if kind == "fifo" else "is larger than 128 MiB"
    ):
        load_tokenizer(path)
