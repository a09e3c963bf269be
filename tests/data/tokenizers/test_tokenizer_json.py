"""Tokenizers as a tokenizer.json give the same ids in the `tokenizers` library."""

import json

import pytest
from tokenizers import Tokenizer

from flatout.data.tokenizers import make_tokenizer, parse_tokenizer
from flatout.data.tokenizers.bpe import _CL100K, _O200K, GPT2_PATTERN, RankTokenizer
from flatout.data.tokenizers.byte_level import layout_of

TEXT = (
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "
    "1234567 dogs couldn't, WOULDN'T, bark!\n\n  def f(x):\n\treturn x ** 2   \r\n"
    "Ça coûte 12,5 €. 東京は雨です。 🙂\n \n  "
)
SAMPLES = (TEXT, TEXT[::-1], "  \n", "\n\n a  b ", "don't\n  \n", "x\r\n\r\n  y  ", "")


def sample(_):
    return [TEXT * 20]


def pieces():
    """Return the pieces of a small vocabulary that was trained on the text."""
    return make_tokenizer("train:400", sample).pieces


@pytest.fixture(params=["byte", "char", "train:400", "cl100k", "o200k"])
def tokenizer(request):
    patterns = {"cl100k": _CL100K, "o200k": _O200K}
    if request.param in patterns:
        return RankTokenizer("made", pieces(), patterns[request.param], 401)
    return make_tokenizer(request.param, sample)


def test_ids_and_text_are_equal(tokenizer):
    other = Tokenizer.from_str(json.dumps(tokenizer.tokenizer_json()))
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert other.encode(text, add_special_tokens=False).ids == ids, text
        assert other.decode(ids, skip_special_tokens=False) == text
    assert other.token_to_id("<|endoftext|>") == tokenizer.eot_id
    assert other.decode([tokenizer.eot_id], skip_special_tokens=True) == ""


def test_a_gpt2_pattern_is_known_when_the_file_is_read_again():
    document = RankTokenizer("made", pieces(), GPT2_PATTERN, 400).tokenizer_json()
    assert layout_of(document).splits_in_bounds


def test_a_tokenizer_json_stays_as_it_was_without_its_post_processor():
    document = make_tokenizer("train:300", sample).tokenizer_json()
    template = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    read = parse_tokenizer(json.dumps(document | {"post_processor": template}), "a file")
    assert read.kind == "huggingface"
    assert read.tokenizer_json() == document


def test_a_pattern_of_unknown_dialect_has_no_counterpart():
    assert RankTokenizer("made", pieces(), r"\w+|\W+", 400).tokenizer_json() is None
