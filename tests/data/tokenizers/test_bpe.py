"""Byte-level BPE: the known patterns, and training."""

from __future__ import annotations

import random

import pytest
import tiktoken
from texts import CORPUS, STRANGE

from flatout.data.tokenizers import base, bpe
from flatout.data.tokenizers.bpe import GPT2_PATTERN, KNOWN_FILES, SCHEMES, train_bpe
from flatout.data.tokenizers.byte_level import CUT_PATTERNS, byte_level_alphabet
from flatout.data.tokenizers.engines import grouped


@pytest.mark.parametrize("known", KNOWN_FILES.values(), ids=lambda known: known.name)
def test_no_token_of_a_known_pattern_crosses_a_cut(known, monkeypatch):
    """Every run of characters is a piece, so a token across a cut would show."""
    text = "".join(
        random.Random(1).choices(
            ["a", "Z", "é", "7", "²", "_", ".", " ", "\n", "\r", "\t", "'s", "/"], k=3000
        )
    )
    merged = dict.fromkeys(
        text[place : place + length].encode() for place in range(3000) for length in (1, 2, 3, 4)
    )
    pieces = [bytes([value]) for value in range(256)] + [
        piece for piece in merged if len(piece) > 1
    ]
    tokenizer = bpe.RankTokenizer(known.name, pieces, known.pattern, len(pieces))
    whole = tokenizer.encode(text)
    monkeypatch.setattr(base, "PIECE_CHARACTERS", 3)
    assert len(list(tokenizer.encode_stream([text]))) > 50
    assert tokenizer.encode(text) == whole


def test_training_is_deterministic_and_gives_the_requested_size():
    texts = [f"word{n % 97} other{n % 31} " for n in range(2000)]
    first, again = train_bpe(texts, 330), train_bpe(texts, 330)
    assert first.vocab_size == 330
    assert first.eot_id == 329
    assert first.digest() == again.digest()
    assert first.pieces[:3] == [b"!", b'"', b"#"]
    assert len(first.encode("word96 other1")) < 8


@pytest.mark.parametrize("pattern", sorted({*SCHEMES, *CUT_PATTERNS}))
def test_grouping_alternatives_does_not_change_the_split(pattern):
    """Every run of characters is a piece, so a different split gives different ids."""
    stream = random.Random(2)
    parts = ["a", "Z", "é", "7", "²", "_", ".", " ", "  ", "\n", "\r", "\t", "'s", "'LL", *"/+|bc)"]
    text = "".join(stream.choice(parts) for _ in range(3000))
    pieces = dict.fromkeys(bytes([value]) for value in range(256))
    for length in (2, 3, 4):
        pieces |= dict.fromkeys(text[at : at + length].encode() for at in range(3000))
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    plain, fast = (
        tiktoken.Encoding("x", pat_str=each, mergeable_ranks=ranks, special_tokens={})
        for each in (pattern, grouped(pattern))
    )
    assert grouped(pattern).startswith("(?:")
    assert fast.encode_ordinary(text) == plain.encode_ordinary(text)


@pytest.mark.parametrize("engine", ["tiktoken", "gigatoken"])
def test_special_tokens_in_text_are_encoded_as_text(engine):
    """An engine may know a special token that this vocabulary does not have."""
    text = "a <|unused|> b<|unused|><|endoftext|>"
    tokenizer = train_bpe(CORPUS, 300).with_engine(engine)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < tokenizer.eot_id


def test_training_and_encoding_split_text_alike():
    """No merge crosses a boundary of the pattern, so the trainer encodes as RankTokenizer does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reference.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    ranks = {index: piece for piece, index in reference.get_vocab(with_added_tokens=False).items()}
    byte_of = byte_level_alphabet()
    pieces = [
        bytes(byte_of[character] for character in ranks[index]) for index in range(len(ranks))
    ]
    ours = bpe.RankTokenizer("x", pieces, GPT2_PATTERN, len(pieces))
    for text in CORPUS + STRANGE:
        assert ours.encode(text) == reference.encode(text).ids


def test_byte_level_alphabet_equals_that_of_tokenizers():
    from tokenizers import pre_tokenizers

    ours = byte_level_alphabet()
    assert set(ours) == set(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for value in range(128):
        ((piece, _),) = split.pre_tokenize_str(chr(value))
        assert ours[piece] == value


@pytest.mark.parametrize("known", KNOWN_FILES.values(), ids=lambda known: known.name)
def test_every_known_pattern_compiles_and_matches_all_text(known):
    tokenizer = bpe.RankTokenizer(
        known.name, [bytes([value]) for value in range(256)], known.pattern, known.eot_id
    )
    for text in CORPUS + STRANGE:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_known_files_agree_with_tiktoken():
    """Digests, end-of-text and token boundaries equal those that tiktoken defines."""
    import re

    import tiktoken_ext.openai_public as public

    def definition(name):
        ranks = {bytes([value]): value for value in range(256)}
        pieces = list(ranks)

        def load(address, expected_hash):
            assert expected_hash in KNOWN_FILES
            return ranks

        original = public.load_tiktoken_bpe
        public.load_tiktoken_bpe = load
        try:
            options = getattr(public, name)()
        finally:
            public.load_tiktoken_bpe = original
        return pieces, options["pat_str"], options["special_tokens"]["<|endoftext|>"]

    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        pieces, pattern, eot = definition(name)
        ours = next(
            known
            for known in KNOWN_FILES.values()
            if known.name in (name, {"r50k_base": "gpt2"}.get(name))
        )
        assert ours.eot_id == eot
        text = "".join(CORPUS + STRANGE)
        words = sorted(set(re.findall(r"\s?\S{2,6}", text)))
        merged = pieces + [
            word.encode()[:length] for word in words for length in range(2, len(word.encode()) + 1)
        ]
        merged = list(dict.fromkeys(merged))
        theirs_tokenizer = bpe.RankTokenizer("theirs", merged, pattern, len(merged))
        ours_tokenizer = bpe.RankTokenizer("ours", merged, ours.pattern, len(merged))
        assert ours_tokenizer.encode(text) == theirs_tokenizer.encode(text)
