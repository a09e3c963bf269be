"""Streamed text: whole characters, spaces between words, stop strings."""

import random

import pytest
from scripted import Script, metaspace, wordpiece

from flatout.data.tokenizers.make import of_bytes
from flatout.inference.generate import Sampling, sample
from flatout.inference.text import DecodedText


def generated(text, stop=(), **sampling):
    model = Script(text.encode())
    return list(sample(model, of_bytes(), "", Sampling(**sampling), stop=stop))


def streamed(tokenizer, ids, prompt=""):
    script = Script(ids, eot=tokenizer.eot_id, past=tokenizer.vocab_size)
    return list(sample(script, tokenizer, prompt))


def test_pieces_are_whole_characters():
    assert generated("aé€😀b", temperature=0) == ["a", "é", "€", "😀", "b"]


def test_a_character_cut_by_the_limit_is_marked():
    assert "".join(generated("a😀", max_tokens=3)) == "a\ufffd"


@pytest.mark.parametrize("make", [metaspace, wordpiece])
@pytest.mark.parametrize("prompt", ["", "the cat"])
@pytest.mark.parametrize("text", ["the cats sat on the mat.", "s"])
def test_words_keep_their_spaces(make, prompt, text):
    tokenizer = make()
    ids, before = tokenizer.encode(text), tokenizer.encode(prompt) if prompt else []
    pieces = streamed(tokenizer, ids, prompt)
    assert prompt + "".join(pieces) == tokenizer.decode([*before, *ids])
    assert (prompt + "".join(pieces)).count(" ") == len((prompt + " " + text).split()) - 1
    assert len(pieces) >= len(ids) - 1, "the text is streamed, not held back until the end"


@pytest.mark.parametrize("prompt", ["", "the \u65e5"])
def test_characters_of_several_tokens_are_not_split(prompt):
    tokenizer = metaspace()
    text = "the \u65e5\u672c\u8a9e \U0001f642. cat"
    ids, before = tokenizer.encode(text), tokenizer.encode(prompt) if prompt else []
    assert len(ids) > len(text), "this text has characters of several tokens"
    pieces = streamed(tokenizer, ids, prompt)
    assert prompt + "".join(pieces) == tokenizer.decode([*before, *ids])
    assert "\ufffd" not in "".join(pieces)
    assert {"\u65e5", "\u672c", "\u8a9e", "\U0001f642"} <= set(pieces)
    cut = streamed(tokenizer, ids[:-7], prompt)
    assert "".join(cut).rstrip("\ufffd") in "".join(pieces)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [metaspace, wordpiece, of_bytes])
def test_a_long_text_is_the_same_streamed_and_decoded_at_once(make, seed):
    """Dropping old ids does not change the text."""
    tokenizer, draw = make(), random.Random(seed)
    words = ["the", "cats", "sat", "\u65e5\u672c\u8a9e", "\U0001f642", "on", "mat."]
    ids = tokenizer.encode(" ".join(draw.choice(words) for _ in range(400)))
    before = tokenizer.encode("the mat") if seed % 2 else []
    text = DecodedText(tokenizer, before)
    pieces = [text.push(token) for token in ids]
    whole = tokenizer.decode(before) + "".join(pieces) + text.rest()
    assert whole == tokenizer.decode([*before, *ids])
    assert len(text._ids) <= 32


def test_bytes_that_are_not_text_are_marked_in_place():
    draw = random.Random(1)
    ids = [draw.choice([*range(256), 65, 66, 0xC3, 0xA9, 0xF0, 0x9F]) for _ in range(2000)]
    text = DecodedText(of_bytes(), [])
    found = "".join(text.push(token) for token in ids) + text.rest()
    assert found == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["lo"], "hel"),
        (["ll"], "he"),
        (["h"], ""),
        (["xyz", "o wor"], "hell"),
        (["zzz"], "hello world"),
        (["world!"], "hello world"),
    ],
)
def test_stop_strings_are_not_shown(stop, text):
    assert "".join(generated("hello world", stop=stop)) == text


def test_the_start_of_a_stop_string_is_held_back_no_longer_than_needed():
    assert generated("a\nb\n\nc", stop=["\n\n"]) == ["a", "\nb"]
