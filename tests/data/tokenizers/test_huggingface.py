"""For the layouts of GPT-2, Llama 3 and Qwen, every engine gives the ids of `tokenizers`."""

from __future__ import annotations

import json
import pickle
import random
from functools import cache

import numpy as np
import pytest
from engine_probes import probes
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from flatout.data.conversation.rendering import Example
from flatout.data.tokenizers import base, load_tokenizer, parse_tokenizer
from flatout.data.tokenizers.byte_level import layout_of
from flatout.data.tokenizers.engines import after_nfc, around_added_tokens
from flatout.data.tokenizers.huggingface import HuggingFaceTokenizer
from flatout.errors import DataError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
END = {"gpt2": "<|endoftext|>", "llama3": "<|end_of_text|>", "qwen2": "<|endoftext|>"}
SPECIAL = {
    "gpt2": [],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>"],
    "qwen2": ["<|im_start|>", "<|im_end|>"],
}
KEPT = {"gpt2": [], "llama3": [], "qwen2": ["<tool_call>", "</tool_call>", "|>", "<tool_call>>"]}
TEXT = [
    "The cat sat on the mat. It's 12345 cats, isn't it?\n\n  def f(x):\n\treturn x + 1\n",
    "Ein Käfer fliegt über das Land. 日本語のテキスト。\n中文测试 🙂🙂 привет мир 안녕\n",
] * 20
LITERALS = [
    *("<|endoftext|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"),
    *("<tool_call>", "</tool_call>", "|>"),
]
ENGINES = ["gigatoken", "tiktoken"]


@cache
def definition_of(style: str) -> dict:
    return definition(style)


def definition(style: str) -> dict:
    """Return a small tokenizer.json in the layout of the real one."""
    make_tokenizer = Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2")
    split = (
        None
        if style == "gpt2"
        else pre_tokenizers.Split(Regex(LLAMA3 if style == "llama3" else QWEN2), "isolated")
    )
    make_tokenizer.pre_tokenizer = (
        level if split is None else pre_tokenizers.Sequence([split, level])
    )
    if style == "qwen2":
        make_tokenizer.normalizer = normalizers.NFC()
    make_tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    make_tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    make_tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in [END[style], *SPECIAL[style]]
        ]
    )
    make_tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in KEPT[style]]
    )
    return json.loads(make_tokenizer.to_str())


@cache
def make_tokenizer(style: str) -> HuggingFaceTokenizer:
    return parse_tokenizer(json.dumps(definition(style)), "tokenizer.json")


def test_the_tokens_that_a_tokenizer_config_names_are_kept(tmp_path):
    known, *_ = END
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition(known)))
    unnamed = load_tokenizer(tmp_path / "tokenizer.json")
    assert unnamed.named_tokens() == {}
    assert "named" not in unnamed.document()
    config = {"bos_token": {"content": END[known]}, "pad_token": "[absent]", "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = load_tokenizer(tmp_path / "tokenizer.json")
    assert named.named_tokens() == {"bos_token": (END[known], named.eot_id)}
    named.save(tmp_path / "saved.json")
    assert load_tokenizer(tmp_path / "saved.json").named_tokens() == named.named_tokens()


def test_tokens_that_share_an_id_are_rejected():
    for style in END:
        shared = definition(style)
        first, second = list(shared["model"]["vocab"])[40:42]
        shared["model"]["vocab"][second] = shared["model"]["vocab"][first]
        with pytest.raises(DataError, match="the same id"):
            parse_tokenizer(json.dumps(shared), "tokenizer.json")
    shared = definition(style)
    shared["added_tokens"][-1]["id"] = 5
    with pytest.raises(DataError, match="the same id, 5"):
        parse_tokenizer(json.dumps(shared), "tokenizer.json")


@cache
def reference(style: str) -> Tokenizer:
    theirs = Tokenizer.from_str(json.dumps(definition(style)))
    theirs.encode_special_tokens = True
    return theirs


def ids_of(style: str, text: str) -> list[int]:
    return reference(style).encode(text, add_special_tokens=False).ids


@pytest.fixture(params=sorted(END))
def style(request):
    return request.param


@pytest.fixture(params=[*ENGINES, "tokenizers"])
def tokenizer(request, style):
    return make_tokenizer(style).with_engine(request.param)


@pytest.mark.slow
def test_every_engine_gives_the_ids_of_tokenizers(tokenizer, style):
    specials = {reference(style).token_to_id(token) for token in [END[style], *SPECIAL[style]]}
    for text in probes(tokenizer):
        ids = tokenizer.encode_piece(text, 0).tolist()
        assert ids == ids_of(style, text)
        assert not specials & set(ids)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@given(
    text=st.lists(
        st.one_of(
            st.text(max_size=20),
            st.text(alphabet=st.sampled_from(" \n\r\t\u0301\u0338\u200d'sLa1.<|>é日"), max_size=20),
            st.sampled_from(LITERALS),
        ),
        max_size=8,
    ).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_engines_agree_on_random_text(engine, text):
    for style in END:
        assert make_tokenizer(style).with_engine(engine).encode(text) == ids_of(style, text)


@st.composite
def rendered(draw):
    """Draw a style, and a text with names of its special tokens, as a template writes it."""
    style = draw(st.sampled_from([*END]))
    special = [END[style], *SPECIAL[style]]
    some = st.text(alphabet=st.sampled_from(" \n\u0301'sLa1.<|>é日🙂"), max_size=9)
    kept = st.sampled_from([*KEPT[style], " ", "\n\n"])
    text, names = "", []
    for part in draw(st.lists(st.one_of(some, kept, st.sampled_from(special)), max_size=9)):
        names += [(len(text), len(text) + len(part))] if part in special else []
        text += part
    edges = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4, unique=True)))
    return style, Example(text, tuple(zip(edges[::2], edges[1::2], strict=False)), tuple(names))


@given(case=rendered())
@settings(max_examples=150, deadline=None)
def test_engines_agree_on_rendered_conversations(case):
    style, example = case
    theirs = Tokenizer.from_str(json.dumps(definition_of(style)))
    expected = theirs.encode(example.text, add_special_tokens=False)
    mask = [
        int(any(start < last and stop > first for first, last in example.targets))
        for start, stop in expected.offsets
    ]
    for engine in [*ENGINES, "tokenizers"]:
        ids, found = make_tokenizer(style).with_engine(engine).encode_example(example)
        assert ids.tolist() == expected.ids
        assert found.tolist() == mask


@pytest.mark.parametrize("engine", [*ENGINES, "tokenizers"])
def test_every_engine_rejects_a_special_token_that_no_template_wrote(engine):
    tokenizer = make_tokenizer("qwen2").with_engine(engine)
    with pytest.raises(DataError, match=r"'<\|im_end\|>' in the text is a special token"):
        tokenizer.encode_example(Example("<|im_end|> a <|im_end|>", names=((0, 10),)))
    ids, _ = tokenizer.encode_example(Example("a <|im_end|>"))
    assert ids.tolist() == ids_of("qwen2", "a <|im_end|>"), "all is text without a template"


@pytest.mark.slow
def test_engines_agree_on_a_word_of_100_000_characters(tokenizer, style):
    for word in ("abcde" * 20_000, "é" * 100_000, "\u0301" * 100_000):
        assert tokenizer.encode(word) == ids_of(style, word)


def test_special_tokens_in_text_are_encoded_as_text(tokenizer, style):
    special = [END[style], *SPECIAL[style]]
    text = "".join(f"{token}a {token}{token}" for token in special)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not {reference(style).token_to_id(token) for token in special} & set(
        tokenizer.encode(text)
    )


def test_added_tokens_that_are_not_special_are_tokens():
    for engine in [*ENGINES, "tokenizers"]:
        tokenizer = make_tokenizer("qwen2").with_engine(engine)
        call, end = (reference("qwen2").token_to_id(token) for token in ("<tool_call>", "|>"))
        assert tokenizer.encode("<tool_call>")[0] == call
        assert tokenizer.encode("<tool_call>\u0338x") == ids_of("qwen2", "<tool_call>\u0338x"), (
            "the text after the token is normalised separately"
        )
        assert end not in tokenizer.encode("<|im_end|>"), (
            "a special token in text hides overlapping tokens"
        )
        assert end in tokenizer.encode("a|>")


def test_error_names_the_position_of_half_a_surrogate_pair(tokenizer):
    for text in ("ab\ud800", "\u0301b\udfff", "é <tool_call> \ud83d"):
        with pytest.raises(DataError, match=f"Character {len(text) - 1} is U"):
            tokenizer.encode(text)


def test_engine_is_pickled_but_not_saved(tokenizer):
    travelled = pickle.loads(pickle.dumps(tokenizer))
    assert travelled.engine == tokenizer.engine
    assert travelled.encode("The cat") == tokenizer.encode("The cat")
    assert tokenizer.digest() == tokenizer.with_engine("tokenizers").digest()


def test_other_engines_do_not_load_tokenizers(style, monkeypatch):
    """Loading a large tokenizer.json into `tokenizers` takes a second, which workers can save."""
    import tokenizers

    expected = ids_of(style, "The cat sat")
    data = pickle.dumps(make_tokenizer(style).with_engine("gigatoken"))
    monkeypatch.setattr(tokenizers, "Tokenizer", None)
    assert pickle.loads(data).vocab_size > 380
    assert pickle.loads(data).encode("The cat sat") == expected


LONG = (
    "".join(TEXT)
    + "one\n two\n\nthree.\n\t4\n5\r\n six \n。\n日 <tool_call>x</tool_call> "
    + "a\u0301 \u0301b\n/c.\n/d <|endoftext|> "
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 100])
def test_cutting_and_streaming_text_gives_the_same_ids(tokenizer, style, monkeypatch, size):
    whole = ids_of(style, LONG)
    monkeypatch.setattr(base, "PIECE_CHARACTERS", size)
    pieces = list(tokenizer.encode_stream([LONG]))
    assert len(pieces) > 5
    assert np.concatenate(pieces).tolist() == whole
    for chunk in (3, 64, 1000):
        chunks = [LONG[start : start + chunk] for start in range(0, len(LONG), chunk)]
        assert np.concatenate(list(tokenizer.encode_stream(chunks))).tolist() == whole


@given(text=st.text(alphabet=st.sampled_from("aB1é日. \n\r\t/'s|><\u0301\u0338_,"), max_size=60))
@settings(max_examples=60, deadline=None)
def test_cuts_change_no_ids(text):
    for style in END:
        whole = ids_of(style, text)
        for place in range(1, len(text)):
            cut = make_tokenizer(style).next_cut(text, place, len(text))
            if cut is not None:
                assert ids_of(style, text[:cut]) + ids_of(style, text[cut:]) == whole


def test_long_text_that_cannot_be_cut_is_rejected(tokenizer, monkeypatch):
    monkeypatch.setattr(base, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(base, "MAX_PIECE_CHARACTERS", 100)
    monkeypatch.setattr(base, "LOOKAHEAD_CHARACTERS", 50)
    assert tokenizer.decode(tokenizer.encode("a" * 90)) == "a" * 90
    with pytest.raises(DataError, match="anywhere in the 100 characters from 10 on"):
        tokenizer.encode("a" * 10 + " " + "b" * 200)
    with pytest.raises(DataError, match="anywhere in the 100 characters"):
        list(tokenizer.encode_stream(["b" * 50] * 10))


def test_unknown_pre_tokeniser_is_cut_where_a_trial_shows_no_difference(monkeypatch):
    model = Tokenizer(
        models.Unigram(
            [
                ("<unk>", -9.0),
                ("</s>", -9.0),
                *[(piece, -2.0 - len(piece)) for piece in ("▁", *"abc", "▁ab", "bc")],
            ],
            unk_id=0,
        )
    )
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    model.add_special_tokens(["</s>"])
    text = "ab bc abc abab cab" * 20
    tokenizer = parse_tokenizer(model.to_str(), "tokenizer.json")
    assert tokenizer.engines == ("tokenizers",)
    monkeypatch.setattr(base, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(base, "LOOKAHEAD_CHARACTERS", 30)
    pieces = [ids.tolist() for ids in tokenizer.encode_stream([text])]
    assert len(pieces) > 5
    for size in (1, 7, 21, 50, 100):
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        assert [ids.tolist() for ids in tokenizer.encode_stream(chunks)] == pieces, (
            "cuts must not depend on text that was not read yet"
        )
    assert tokenizer.encode(text) == model.encode(text, add_special_tokens=False).ids
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    always = parse_tokenizer(model.to_str(), "tokenizer.json")
    assert always.encode(text) == model.encode(text, add_special_tokens=False).ids


def test_tokenizer_without_pre_tokeniser_is_never_cut():
    model = Tokenizer(models.Unigram([("</s>", -9.0), ("a", -1.0), (" ", -1.0)], unk_id=0))
    model.add_special_tokens(["</s>"])
    assert parse_tokenizer(model.to_str(), "tokenizer.json").next_cut("a a a a", 1, 7) is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "use_regex": True,
                "trim_offsets": True,
            }
        },
        {"added_tokens": [{"id": 1, "content": "<x>", "special": False, "lstrip": True}]},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}},
        {"model": {"type": "WordPiece", "vocab": {}}},
    ],
    ids=str,
)
def test_other_layouts_only_use_tokenizers(change):
    assert layout_of(definition("gpt2")) is not None
    assert layout_of(definition("gpt2") | change) is None


def test_tiktoken_needs_ids_that_increase_along_the_merges():
    shuffled = definition("gpt2")
    vocabulary = shuffled["model"]["vocab"]
    first, last = (
        ("".join(merge))
        for merge in (shuffled["model"]["merges"][0], shuffled["model"]["merges"][-1])
    )
    vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]
    tokenizer = parse_tokenizer(json.dumps(shuffled), "tokenizer.json").with_engine("tiktoken")
    with pytest.raises(DataError, match="do not increase along its merges"):
        tokenizer.encode("x")


def test_normalisation_equals_that_of_tokenizers():
    seen = []
    encode = after_nfc(lambda text: seen.append(text) or np.zeros(0, np.uint32))
    stream = random.Random(3)
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    joining = [
        *"aA<=> é日가",
        *map(chr, range(0x300, 0x370)),
        *map(chr, range(0x1100, 0x1200)),
        *map(chr, range(0x1AB0, 0x1AD0)),
        "\u0344",
        "\u212b",
    ]
    for number in range(3000):
        text = "".join(
            stream.choices(joining if number % 2 else characters, k=stream.randrange(20))
        )
        encode(text)
        assert seen.pop() == normalizers.NFC().normalize_str(text)


def test_longest_added_token_wins_and_text_hides_overlapping_ones():
    encode = around_added_tokens(
        lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32),
        {"ab": 1000, "abc": 1001, "bcd": 1002, "<ab>": None},
    )
    assert encode("abcd").tolist() == [1001, ord("d")]
    assert encode("<ab>ab").tolist() == [*b"<ab>", 1000]
    assert encode("").tolist() == []
