"""Makes tokenizers: from the text of a corpus, from numbers, and from .tiktoken files."""

from __future__ import annotations

import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from flatout.data.tokenizers.engines import (
    AS_BYTES,
    CL100K,
    GPT2,
    O200K,
    byte_level_alphabet,
    split_by,
)
from flatout.data.tokenizers.tokenizer import (
    MAX_VOCAB_SIZE,
    Tokenizer,
    is_panic,
    known_cut,
    library_tokenizer,
)
from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject

END_OF_TEXT = "<|endoftext|>"
Sample = Callable[[int | None], Iterable[str]]
"""Returns about this many bytes of the corpus, evenly spread. None means the whole corpus."""
BoundedSample = Callable[[int], Iterable[str]]

TRAINING_BYTES = 8_000_000
"""Bytes of text to train on: a few seconds of work. More hardly changes the vocabulary."""
TRAINING_PIECE_CHARACTERS = 1 << 15
MAX_TRAINING_PIECE_CHARACTERS = 1 << 16
VOCABULARY_SIZES = range(258, 1_000_001)
_WHOLE_FILE = "Use a complete .tiktoken file."
_CODE_POINTS = 0x110000

KNOWN_FILES = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": (GPT2, 50256),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": (GPT2, 50256),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": (CL100K, 100257),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": (O200K, 199999),
}
"""The pattern and the id of end-of-text of gpt2, p50k_base, cl100k_base and o200k_base, which
their .tiktoken files do not state, by the SHA-256 of the file.
"""
_SPELLED = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": GPT2,
}
"""Patterns in tiktoken's spelling, where the difference is more than that of the dialects."""


def of_bytes() -> Tokenizer:
    """Return the tokenizer with one id per UTF-8 byte. End-of-text is 256."""
    return _made(_spelled({bytes([value]): value for value in range(256)}), [], 256, AS_BYTES)


def of_numbers(argument: str) -> Tokenizer:
    """Return the tokenizer of `N` ids without text, or of `N:E`, where E is end-of-text.

    Its text is ids in decimal, separated by spaces.

    Raises: DataError when these are not such numbers.
    """
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", argument, re.ASCII)
    size = int(match[1]) if match else 0
    eot_id = int(match[2]) if match and match[2] else size - 1
    if not 1 < size <= MAX_VOCAB_SIZE >> 2 or eot_id >= size:
        raise DataError(
            f"The tokenizer ids:{argument} does not contain a number of ids.",
            fix="Write ids:50257, or ids:50257:50256 if an id other than the last is end-of-text.",
        )
    numbers = {str(index): index for index in range(size) if index != eot_id}
    model: JsonObject = {"type": "WordLevel", "unk_token": ""}
    model["vocab"] = numbers | {END_OF_TEXT: eot_id}
    return _stored(model, eot_id, {"type": "WhitespaceSplit"}, None)


def of_characters(texts: Iterable[str], progress: Progress = SILENT) -> Tokenizer:
    """Return the tokenizer with one id per character of the texts, in the order of code points.

    End-of-text is last. Halves of surrogate pairs are no characters.

    Raises: DataError when there is none.
    """
    seen = np.zeros(_CODE_POINTS, np.bool_)
    with progress.task("Collecting characters", unit="MB") as task:
        for text in texts:
            seen[np.frombuffer(text.encode("utf-32-le", errors="ignore"), "<u4")] = True
            task.advance(len(text) / 1e6)
    codes = np.flatnonzero(seen).tolist()
    if not codes:
        raise DataError(
            "The corpus is empty: there are no characters to build a vocabulary from.",
            fix="Name a file or directory with text in it.",
        )
    vocabulary = {chr(code): index for index, code in enumerate(codes)}
    return _made(vocabulary, [], len(codes), None)


def trained(argument: str, sample: BoundedSample, progress: Progress = SILENT) -> Tokenizer:
    """Return a byte-level BPE of at most `argument` ids, trained on a sample.

    The 256 bytes come first, then the merges in the order found, then end-of-text. Text is split by
    GPT-2's pattern. Equal texts give equal vocabularies.

    Raises: DataError when `argument` is not a vocabulary size, or the corpus is empty.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    if not argument.isdecimal() or int(argument) not in VOCABULARY_SIZES:
        raise DataError(
            f"{f'train:{argument}'!r} does not name a vocabulary size.",
            fix="Give a number from 258 (the bytes, end-of-text, one merge) to 1,000,000, "
            "for example train:4096.",
        )
    size = int(argument)
    corpus = [text.encode(errors="ignore").decode() for text in sample(TRAINING_BYTES)]
    if not any(corpus):
        raise DataError(
            "The corpus is empty: there is no text to train a tokenizer on.",
            fix="Name a file or directory with text in it.",
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    size_mb = sum(map(len, corpus)) / 1e6
    with progress.task(f"Training a tokenizer of {size:,} tokens on {size_mb:.1f} MB of text"):
        library.train_from_iterator((piece for text in corpus for piece in _pieces(text)), trainer)
    library.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    tokenizer = Tokenizer(library.to_str().encode(), END_OF_TEXT)
    if tokenizer.vocab_size < size:
        progress.say(
            f"The vocabulary has {tokenizer.vocab_size:,} tokens, not {size:,}: "
            "no other pairs repeat in the text."
        )
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces that the pattern splits like the whole text.

    A text that cannot be cut is truncated, because the trainer needs a hundred bytes of memory per
    character of a piece, and its time grows with the square of the length of a word.
    """
    start = 0
    while (cut := known_cut(text, start + TRAINING_PIECE_CHARACTERS, len(text))) is not None:
        yield text[start : min(cut, start + MAX_TRAINING_PIECE_CHARACTERS)]
        start = cut
    yield text[start : start + MAX_TRAINING_PIECE_CHARACTERS]


def from_tiktoken(content: bytes, name: str, pattern: str | None = None) -> Tokenizer:
    """Return the tokenizer in a .tiktoken file: one id per line, as base64 and rank.

    Any two neighbours merge whose bytes together are a piece, lowest id first, so each piece gets a
    merge for every pair that makes it. `pattern` splits text, and is None for a published file.

    Raises: DataError when it is not one, or its pattern is neither known nor given, or invalid.
    """
    known = KNOWN_FILES.get(hashlib.sha256(content).hexdigest())
    if not pattern and (pattern == "" or known is None):
        empty = "--pattern must not be empty." if pattern == "" else None
        raise DataError(
            empty
            or f"{name} is not a known .tiktoken file, so the pattern that splits text is unknown.",
            fix="Give its regular expression with --pattern. "
            "If it is a published file, it may be damaged.",
        )
    ranks = _ranks(content, name)
    split, eot_id = known or ("", max(ranks.values()) + 1)
    if pattern:
        # in `tokenizers`, $ is the end of a line, and + after an interval repeats it
        split = pattern.replace(r"\s++$", r"\s++\z").replace(r"\p{N}{1,3}+", r"(?>\p{N}{1,3})")
        split = _SPELLED.get(pattern, split)
    vocabulary = _spelled(ranks)
    try:
        return _made(vocabulary, _merges(vocabulary), eot_id, split_by(split))
    except BaseException as error:
        is_failure = isinstance(error, Exception) or is_panic(error)
        if isinstance(error, DataError) or not is_failure:
            raise
        raise DataError(
            f"The pattern of the tokenizer {name} cannot be used: {error}.",
            fix="Correct --pattern.",
        ) from error


def _merges(vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Return the pairs of pieces that make up a piece, by its id, lowest ids first."""
    merges: list[list[str]] = []
    for piece in sorted(vocabulary, key=vocabulary.__getitem__):
        pairs = [
            [left, right]
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in vocabulary and (right := piece[cut:]) in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += pairs
    return merges


def _ranks(content: bytes, name: str) -> dict[bytes, int]:
    """Return the rank of each piece in a .tiktoken file.

    Raises: DataError for a malformed line, or a single byte that is missing.
    """
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            piece, digits = line.split()
            rank, decoded = int(digits), binascii.a2b_base64(piece, strict_mode=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{name}, line {number} is not `BASE64 RANK`: {error}.", fix=_WHOLE_FILE
            ) from error
        if not 0 <= rank < MAX_VOCAB_SIZE or rank in ranks:
            reason = "appears twice"
            if rank not in ranks:
                reason = f"is not between 0 and {MAX_VOCAB_SIZE - 1:,}"
            raise DataError(f"{name}, line {number}: the rank {rank:,} {reason}.", fix=_WHOLE_FILE)
        ranks[rank] = decoded
    missing = 256 - sum(len(piece) == 1 for piece in set(ranks.values()))
    if missing:
        raise DataError(f"{name} lacks {missing} of the 256 single bytes.", fix=_WHOLE_FILE)
    return {piece: rank for rank, piece in ranks.items()}


def _spelled(pieces: Mapping[bytes, int]) -> dict[str, int]:
    """Return the ids of byte strings by their spelling in a byte-level vocabulary."""
    character_of = {byte: character for character, byte in byte_level_alphabet().items()}
    return {"".join(map(character_of.__getitem__, piece)): pieces[piece] for piece in pieces}


def _made(
    vocabulary: Mapping[str, int],
    merges: list[list[str]],
    eot_id: int,
    pre_tokenizer: JsonObject | None,
) -> Tokenizer:
    """Return a BPE of these pieces, which are characters without a pre-tokeniser.

    A word that is a piece is encoded as that piece, whatever the merges.
    """
    known = dict(vocabulary)
    if eot_id != len(known):  # a token that only is an added one would get the next id
        known[END_OF_TEXT] = eot_id
    model = {"type": "BPE", "ignore_merges": True, "vocab": known, "merges": merges}
    return _stored(model, eot_id, pre_tokenizer, AS_BYTES if pre_tokenizer else {"type": "Fuse"})


def _stored(
    model: JsonObject,
    eot_id: int,
    pre_tokenizer: JsonObject | None,
    decoder: JsonObject | None,
) -> Tokenizer:
    special = {"id": eot_id, "content": END_OF_TEXT, "special": True, "normalized": False}
    special |= {"single_word": False, "lstrip": False, "rstrip": False}
    document = {
        "version": "1.0",
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    # as `tokenizers` writes it, which checks it
    content = library_tokenizer(json.dumps(document).encode()).to_str()
    return Tokenizer(content.encode(), END_OF_TEXT)
