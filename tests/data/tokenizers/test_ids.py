"""Ids without text."""

import pytest

from flatout.data.tokenizers import load_tokenizer, make_tokenizer
from flatout.data.tokenizers.base import NotEncodable
from flatout.errors import DataError


def ids(spec):
    return make_tokenizer(spec, lambda _: ())


def test_the_last_id_is_end_of_text_or_the_one_named(tmp_path):
    assert (ids("ids:50257").vocab_size, ids("ids:50257").eot_id) == (50_257, 50_256)
    named = ids("ids:300:0")
    assert (named.vocab_size, named.eot_id) == (300, 0)
    named.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.name, again.digest()) == ("ids:300:0", named.digest())


def test_text_is_numbers():
    tokenizer = ids("ids:300")
    assert tokenizer.encode("12  7\n298 ") == [12, 7, 298]
    assert tokenizer.decode([12, 7, 298]) == "12 7 298 "
    assert tokenizer.encode("5 " * 300_000) == [5] * 300_000


@pytest.mark.parametrize("text", ["300", "299", "-1", "a", "1,2", "1" * 30])
def test_other_text_is_rejected(text):
    with pytest.raises(NotEncodable, match="is not an id of the tokenizer ids:300"):
        ids("ids:300").encode(f"1 2 {text}")


@pytest.mark.parametrize("spec", ["ids:", "ids:x", "ids:1", "ids:5:5", "ids:99999999999", "ids:-3"])
def test_a_wrong_number_is_rejected(spec):
    with pytest.raises(DataError, match="does not contain a number of ids"):
        ids(spec)
