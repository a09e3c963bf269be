"""A tokenizer gives the ids of `tokenizers` for its file, whatever encodes, and keeps the text."""

import json
import pickle
import unicodedata
from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
from engine_probes import probes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from some_tokenizers import (
    ALPHABET,
    KEPT,
    KINDS,
    LAYOUTS,
    SPECIAL,
    TEXTS,
    definition,
    engines_of,
    ids_of,
    library_of,
    tokenizer_of,
)
from tokenizers import Tokenizer as Library
from tokenizers import models, processors

from flatout.data.conversation.rendering import Example
from flatout.data.tokenizers import load_tokenizer, parse_tokenizer, tokenizer
from flatout.errors import DataError

LONG = (
    "The cat sat on the mat. It's 12345 cats, isn't it?\n\n  def f(x):\n\treturn x + 1\n" * 3
    + "one\n two\n\nthree.\n\t4\n5\r\n six \n。\n日 <tool_call>x</tool_call> "
    + "a\u0301 \u0301b\n/c.\n/d <|endoftext|> "
)
some_kind = pytest.mark.parametrize("kind", KINDS)


def in_pieces(size):
    """Cut texts after about `size` characters."""
    return mock.patch.object(tokenizer, "PIECE_CHARACTERS", size)


@some_kind
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_ids_are_those_of_tokenizers_for_the_stored_file_and_decode_to_the_text(kind, text):
    assume(kind != "unigram" or "</s>" not in text)  # its end of text, which tokenizers takes
    expected = ids_of(kind, text)
    form = partial(unicodedata.normalize, "NFC") if kind == "qwen2" else str
    for each in engines_of(kind):
        assert each.encode(text) == expected
        if 0 not in expected or kind != "unigram":  # of unknown characters
            assert form(each.decode(expected)) == form(text)
        assert not {*each.special_tokens().values()} & {*expected}


@some_kind
@given(text=TEXTS, size=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_cuts_do_not_change_ids(kind, text, size):
    text += "a b\n " * 8
    for each in engines_of(kind):
        whole = each.encode(text)
        with in_pieces(size):
            assert each.encode(text) == whole


@some_kind
def test_long_texts_are_cut_where_the_pattern_is_known(kind):
    for each in engines_of(kind):
        text = "ab" * 99 if kind == "char" else LONG
        with in_pieces(20):
            found = list(each.encode_pieces(text))
            assert len(list(each.encode_pieces("a" * 90))) == (5 if kind in ("char", "byte") else 1)
        is_known = each.engine == "table" or each.layout is not None
        assert (len(found) > 5) == is_known
        assert {ids.dtype for ids in found} == {np.dtype(np.uint32)}
        assert np.concatenate(found).tolist() == ids_of(kind, text)


@pytest.mark.quick_cases("gpt2", "qwen2", "tiktoken o200k")
@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYOUTS)
def test_gigatoken_gives_the_ids_of_tokenizers_for_every_character_and_long_words(kind):
    slow, fast = engines_of(kind)
    for text in [*probes(slow), "é" * 100_000, "\u0301" * 100_000]:
        assert np.array_equal(fast.encode_piece(text, 0), slow.encode_piece(text, 0)), text[:40]


@st.composite
def rendered(draw):
    """Draw a style, and a text with names of its special tokens, as a template writes it."""
    style = draw(st.sampled_from([*SPECIAL]))
    some = st.text(alphabet=st.sampled_from(" \n\u0301'sLa1.<|>é日🙂"), max_size=9)
    kept = st.sampled_from([*(KEPT if style == "qwen2" else []), " ", "\n\n"])
    text, names = "", []
    for part in draw(st.lists(st.one_of(some, kept, st.sampled_from(SPECIAL[style])), max_size=9)):
        names += [(len(text), len(text) + len(part))] if part in SPECIAL[style] else []
        text += part
    edges = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4, unique=True)))
    return style, Example(text, tuple(zip(edges[::2], edges[1::2], strict=False)), tuple(names))


@cache
def theirs(style):
    return Library.from_buffer(tokenizer_of(style).content)


@given(case=rendered())
@settings(max_examples=150, deadline=None)
def test_a_rendered_conversation_is_encoded_whole(case):
    style, example = case
    expected = theirs(style).encode(example.text, add_special_tokens=False)
    mask = [
        int(any(start < last and stop > first for first, last in example.targets))
        for start, stop in expected.offsets
    ]
    for each in engines_of(style):
        ids, found = each.encode_example(example)
        assert ids.tolist() == expected.ids
        assert found.tolist() == mask


@pytest.mark.parametrize("kind", ["qwen2", "byte", "char", "train"])
def test_a_special_token_that_no_template_wrote_is_rejected(kind):
    name = "<|endoftext|>"
    for each in engines_of(kind):
        with pytest.raises(DataError, match=r"'<\|endoftext\|>' in the text is a special token"):
            each.encode_example(Example(f"{name} a {name}", names=((0, len(name)),)))
        ids, mask = each.encode_example(Example(f"é {name}", ((1, 15),), ((2, 15),)))
        assert ids.tolist() == [*each.encode("é "), each.eot_id]
        assert mask.tolist() == [
            *[0] * len(each.encode("é")),
            *[1] * (len(ids) - len(each.encode("é"))),
        ]
        ids, _ = each.encode_example(Example(f"a {name}"))
        assert ids.tolist() == ids_of(kind, f"a {name}"), "all is text without a template"


@pytest.mark.parametrize("kind", ["gpt2", "byte", "char"])
@pytest.mark.parametrize("decoder", [None, {"type": "Sequence", "decoders": [{"type": "Fuse"}]}])
def test_what_counts_in_a_text_does_not_depend_on_the_decoder(kind, decoder):
    document = json.loads(tokenizer_of(kind).content) | {"decoder": decoder}
    changed = parse_tokenizer(json.dumps(document), "tokenizer.json")
    changed = changed.with_engine(engines_of(kind)[-1].engine)
    example = Example("é ab 日.", ((2, 6),))
    for found, expected in zip(
        changed.encode_example(example), tokenizer_of(kind).encode_example(example), strict=True
    ):
        assert found.tolist() == expected.tolist()


def test_added_tokens_that_are_not_special_are_tokens():
    call, end = map(library_of("qwen2").token_to_id, ("<tool_call>", "|>"))
    for each in engines_of("qwen2"):
        assert each.encode("<tool_call>") == [call]
        assert end in each.encode("a|>")
        assert end not in each.encode("<|im_end|>"), "special text hides overlapping tokens"


def test_end_of_text_is_special_even_if_the_file_does_not_say_so():
    document = definition("gpt2")
    document["added_tokens"][0]["special"] = False
    each = parse_tokenizer(json.dumps(document), "tokenizer.json")
    assert each.eot_id not in each.encode("a<|endoftext|>b")
    assert json.loads(each.content)["added_tokens"][0]["special"] is False


def test_a_model_never_encodes_text_as_a_special_token():
    scores = [("<unk>", -1.0), ("</s>", 0.0), *((one, -2.0) for one in "</s>a")]
    model = Library(models.Unigram(scores, unk_id=0))
    model.add_special_tokens(["<unk>", "</s>"])
    each = parse_tokenizer(model.to_str(), "tokenizer.json")
    assert each.encode("a</s></s>a") == [6, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert each.encode("az") == [6, 0], "text may be encoded as the unknown token"


def test_post_processing_truncation_and_padding_are_kept_and_not_applied():
    made = Library.from_str(json.dumps(definition("gpt2")))
    made.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        special_tokens=[("<|endoftext|>", made.token_to_id("<|endoftext|>"))],
    )
    made.enable_truncation(2)
    made.enable_padding(length=40)
    each = parse_tokenizer(made.to_str(pretty=True), "tokenizer.json")
    assert each.encode("The cat said 12") == ids_of("gpt2", "The cat said 12")
    assert each.content.decode() == made.to_str(pretty=True)


@some_kind
def test_invalid_text_and_unknown_ids(kind):
    for each in engines_of(kind):
        for text in ("aB\ud800", "\u0301a\udfff", "é <tool_call> \ud83d"):
            with pytest.raises(DataError, match=f"Character {len(text) - 1} is U"):
                each.encode(text)
        if kind != "unigram":
            assert each.decode([10**6, *each.encode("a")]) == "\ufffda"
    assert tokenizer_of("byte").decode("日a".encode()[1:]) == "\ufffd\ufffda"


@some_kind
def test_a_tokenizer_is_saved_as_its_file_and_travels_with_its_engine(kind, tmp_path):
    for each in engines_of(kind):
        each.save(tmp_path / "tokenizer.json")
        assert (tmp_path / "tokenizer.json").read_bytes() == each.content
        again = load_tokenizer(tmp_path / "tokenizer.json", sha256=each.digest())
        sent = pickle.loads(pickle.dumps(each))
        for one in (again, sent):
            assert (one.digest(), one.eot_id, one.vocab_size) == (
                each.digest(),
                each.eot_id,
                each.vocab_size,
            )
            assert one.encode(ALPHABET) == each.encode(ALPHABET)
        assert sent.engine == each.engine
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_worker_with_gigatoken_does_not_load_tokenizers(monkeypatch):
    """Loading a large tokenizer.json takes a second, which workers can save."""
    data = pickle.dumps(tokenizer_of("llama3").with_engine("gigatoken"))
    monkeypatch.setattr("tokenizers.Tokenizer", None)
    assert pickle.loads(data).encode("The cat sat") == ids_of("llama3", "The cat sat")


@pytest.mark.parametrize("text", ["ab~", "ab\U0010ffff", "ab\u0000", "ab日"])
def test_an_unknown_character_is_an_error_with_its_position(text):
    from flatout.data.tokenizers.make import of_characters

    with pytest.raises(DataError, match=r"Character 2, .*is not one of the 4 characters"):
        of_characters(["abce"]).encode(text)
