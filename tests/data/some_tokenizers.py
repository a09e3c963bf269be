"""A small tokenizer of every kind, and texts that show differences between encoders."""

import base64
import json
import random
from functools import cache

from hypothesis import strategies as st
from texts import CORPUS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from flatout.data.tokenizers import Tokenizer, make_tokenizer, parse_tokenizer
from flatout.data.tokenizers.engines import LLAMA3, QWEN2
from flatout.data.tokenizers.make import from_tiktoken

ALPHABET = "aBZ1é²_日. \n\r\t/'s|><,\u0301\u0338\u200d\u2028🙂"
SPECIAL = {
    "gpt2": ["<|endoftext|>"],
    "llama3": ["<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>"],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
KEPT = ["<tool_call>", "</tool_call>", "|>", "<tool_call>>"]
"""Tokens of Qwen 2 that are not special."""
LITERALS = [*dict.fromkeys(token for tokens in SPECIAL.values() for token in tokens), *KEPT]
SPELLED = {  # as tiktoken spells them
    "tiktoken gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$"
    r"|\s+(?!\S)|\s",
    "tiktoken cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "tiktoken o200k": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
    "tiktoken own": r"\s?\S+|\s+",
}
LAYOUTS = [*SPECIAL, "train", *[name for name in SPELLED if name != "tiktoken own"]]
"""Tokenizers that gigatoken can encode for."""
KINDS = [*LAYOUTS, "tiktoken own", "byte", "char", "unigram"]

TEXTS = st.lists(
    st.one_of(
        st.text(alphabet=st.sampled_from(ALPHABET), max_size=20),
        st.sampled_from(LITERALS),
        st.sampled_from([*CORPUS, "don't WE'LL", "12345", "  \n\n  ", "//\n/"]),
    ),
    max_size=6,
).map("".join)


@cache
def pieces() -> list[bytes]:
    """Return pieces that cross every boundary of the patterns, the 256 bytes first."""
    stream = random.Random(2)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*" \n\rabB1é日.'/", "'s", "  ", "12", "the"]
    texts = ["".join(stream.choices(words, k=400)) for _ in range(20)]
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    tokenizer = parse_tokenizer(library.to_str(), "tokenizer.json")
    return [tokenizer.decode_bytes([index]) for index in range(tokenizer.eot_id)]


def tiktoken_file(some: list[bytes]) -> bytes:
    """Return the content of a .tiktoken file."""
    return b"".join(base64.b64encode(one) + b" %d\n" % rank for rank, one in enumerate(some))


def definition(style: str) -> dict:
    """Return a small tokenizer.json in the layout of GPT-2's, Llama 3's or Qwen 2's."""
    made = Library(models.BPE(ignore_merges=style == "llama3"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2")
    pattern = Regex(LLAMA3 if style == "llama3" else QWEN2)
    steps = [] if style == "gpt2" else [pre_tokenizers.Split(pattern, "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
    if style == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*CORPUS * 20, "中文测试 привет мир 안녕 isn't\n" * 20], trainer)
    made.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIAL[style]])
    if style == "qwen2":
        made.add_tokens([AddedToken(one, special=False, normalized=False) for one in KEPT])
    return json.loads(made.to_str())


def unigram() -> Library:
    """Return a tokenizer with a score for each piece, which splits at spaces."""
    scores = [
        ("<unk>", -9.0),
        ("</s>", -9.0),
        *((one, -4.0) for one in sorted({*ALPHABET} - {" "})),
    ]
    scores += [
        ("▁", -3.0),
        ("▁a", -3.0),
        ("aB", -3.5),
        ("</", -5.0),
        *((c, -6.0) for c in "thendoftx"),
    ]
    made = Library(models.Unigram(scores, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    made.add_special_tokens(["<unk>", "</s>"])
    return made


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return one of KINDS."""
    if kind in SPECIAL:
        return parse_tokenizer(json.dumps(definition(kind)), "tokenizer.json")
    if kind in SPELLED:
        return from_tiktoken(tiktoken_file(pieces()), "own.tiktoken", SPELLED[kind])
    if kind == "unigram":
        return parse_tokenizer(unigram().to_str(), "tokenizer.json")
    texts = [*CORPUS, *LITERALS, ALPHABET, "don't WE'LL"]
    return make_tokenizer({"train": "train:400"}.get(kind, kind), lambda _: texts)


@cache
def library_of(kind: str) -> Library:
    """Return what the `tokenizers` library makes of the stored file, all text being text."""
    library = Library.from_buffer(tokenizer_of(kind).content)
    library.encode_special_tokens = True
    return library


def ids_of(kind: str, text: str) -> list[int]:
    """Return the right ids of a text."""
    return library_of(kind).encode(text, add_special_tokens=False).ids


def engines_of(kind: str) -> list[Tokenizer]:
    """Return one of KINDS with each of its engines."""
    tokenizer = tokenizer_of(kind)
    return [tokenizer, *([tokenizer.with_engine("gigatoken")] if kind in LAYOUTS else [])]
