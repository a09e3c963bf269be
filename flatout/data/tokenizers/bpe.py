"""Byte-level BPE, trained on the corpus or read from a .tiktoken file. tiktoken defines its ids."""

from __future__ import annotations

import binascii
import hashlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import cached_property
from threading import Event, Thread
from typing import ClassVar, NamedTuple, Self

from flatout.data.tokenizers.base import (
    END_OF_TEXT,
    MAX_VOCAB_SIZE,
    UNKNOWN,
    BoundedSample,
    Document,
    Encode,
    Ids,
    NotEncodable,
    Sample,
    Tokenizer,
    TokenizerFile,
    confirmed_cut,
    engine_failures,
    is_panic,
    join_pieces,
    known_cut,
    require_ids,
)
from flatout.data.tokenizers.byte_level import (
    GPT2_SPLIT,
    byte_level_alphabet,
    byte_level_document,
    split_by,
)
from flatout.data.tokenizers.engines import gigatoken_of_ranks, grouped, tiktoken_of
from flatout.errors import DataError
from flatout.progress import SILENT, Progress

SPEC = "train:N"
SUFFIX = ".tiktoken"
LISTED_AS = "train:N, FILE.tiktoken"

GPT2_PATTERN = r"'(?:[sdmt]|ll|re|ve)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""GPT-2's pattern, with possessive quantifiers, so that long runs need no backtracking."""

_CL100K = (
    r"'(?i:[sdmt]|ll|re|ve)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + _O200K_END,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + _O200K_END,
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)

SCHEMES = {GPT2_PATTERN: "gpt2", _CL100K: "gpt4", _O200K: "o200k"}
"""gigatoken's names of the known patterns."""

TRAINING_BYTES = 8_000_000
"""Bytes of text to train on: a few seconds of work. More hardly changes the vocabulary."""
TRAINING_PIECE_CHARACTERS = 1 << 15
MAX_TRAINING_PIECE_CHARACTERS = 1 << 16
VOCABULARY_SIZES = range(258, 1_000_001)
_MIXED = "Don't 12a\tb\r\n\n c\u0301\u200d\x00 _+=1;//!\u3000日本👍🏽 "
"""Characters of every class, which the pattern of a file must match."""
_WHOLE_FILE = "Use a complete .tiktoken file."
STOP_S = 1.0
"""How long an interrupted caller waits for the thread to notice.

A thread of native code that calls Python while the interpreter shuts down can abort the process.
"""


class KnownFile(NamedTuple):
    """Properties of a published .tiktoken file that the file itself does not state."""

    name: str
    pattern: str
    eot_id: int


KNOWN_FILES = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": KnownFile(
        "gpt2", GPT2_PATTERN, 50256
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": KnownFile(
        "p50k_base", GPT2_PATTERN, 50256
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": KnownFile(
        "cl100k_base", _CL100K, 100257
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": KnownFile(
        "o200k_base", _O200K, 199999
    ),
}
"""Published files by their SHA-256."""


class RankTokenizer(Tokenizer):
    """Byte-level BPE: a pattern splits text, then neighbours merge, lowest resulting id first.

    `pieces` contains the bytes of each id, None for an unused id, such as end-of-text.
    """

    kind: ClassVar[str] = "bpe"
    needs_corpus = True

    def __init__(
        self, name: str, pieces: Sequence[bytes | None], pattern: str, eot_id: int
    ) -> None:
        self.engines = ("gigatoken", "tiktoken") if pattern in SCHEMES else ("tiktoken",)
        self.engine = "tiktoken"
        self.name = name
        self.pieces = list(pieces)
        self.pattern = pattern
        self.eot_id = eot_id
        self.vocab_size = max(len(pieces), eot_id + 1)
        require_ids(name, self.vocab_size if eot_id >= 0 else eot_id + 1)
        self._is_known = pattern in SCHEMES
        self._bytes = [UNKNOWN if piece is None else piece for piece in pieces]
        self._bytes += [UNKNOWN] * (self.vocab_size - len(pieces))
        self._bytes[eot_id] = END_OF_TEXT.encode()

    @classmethod
    def from_corpus(
        cls, argument: str, sample: Sample, train_on: BoundedSample, progress: Progress
    ) -> RankTokenizer:
        """Return a tokenizer with a vocabulary of at most `argument` ids, trained on the corpus.

        Raises: DataError when `argument` is not a vocabulary size, or the corpus is empty.
        """
        if not argument.isdecimal() or int(argument) not in VOCABULARY_SIZES:
            raise DataError(
                f"{f'train:{argument}'!r} does not name a vocabulary size.",
                fix="Give a number from 258 (the bytes, end-of-text, one merge) to 1,000,000, "
                "for example train:4096.",
            )
        size = int(argument)
        tokenizer = train_bpe(train_on(TRAINING_BYTES), size, progress=progress)
        if tokenizer.vocab_size < size:
            progress.say(
                f"The vocabulary has {tokenizer.vocab_size:,} tokens, not {size:,}: "
                "no other pairs repeat in the text."
            )
        return tokenizer

    @classmethod
    def from_file(cls, file: TokenizerFile) -> Self:
        """Return the tokenizer in a .tiktoken file: one id per line, as base64 and rank.

        Raises: DataError when it is not one, or its pattern is neither known nor given, cannot be
                used, or omits text.
        """
        if file.pattern == "":
            raise DataError(
                "--pattern must not be empty.",
                fix="Give the regular expression that the tokenizer was trained with.",
            )
        known = KNOWN_FILES.get(hashlib.sha256(file.data).hexdigest())
        if known is None and file.pattern is None:
            raise DataError(
                f"{file.name} is not a known .tiktoken file, so the pattern that splits text is "
                "unknown.",
                fix="Give its regular expression with --pattern. "
                "If it is a published file, it may be damaged.",
            )
        ranks = _ranks(file)
        pieces = [ranks.get(rank) for rank in range(max(ranks) + 1)]
        if known is not None:
            return cls(known.name, pieces, file.pattern or known.pattern, known.eot_id)
        made = cls(file.stem, pieces, str(file.pattern), len(pieces))
        fix = "Correct --pattern: it must match every part of a text, and never the empty string."
        try:
            decoded = _MIXED if made._is_known else made.decode(made.encode(_MIXED))
        except NotEncodable as error:
            what = f"The pattern of the tokenizer {made.name!r} cannot be used: {error.what}"
            raise DataError(what, fix=fix) from error
        if decoded != _MIXED:
            raise DataError(
                f"The pattern of the tokenizer {made.name!r} omits text: {_MIXED!a} is decoded as "
                f"{decoded!a}.",
                fix=fix,
            )
        return made

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Return the tokenizer that `document` describes."""
        pieces = [None if piece is None else a2b_base64(piece) for piece in document["pieces"]]
        return cls(str(document["name"]), pieces, str(document["pattern"]), int(document["eot_id"]))

    def document(self) -> Document:
        """Return the pattern, the end-of-text id, and every piece as base64."""
        pieces = [
            None if piece is None else b2a_base64(piece, newline=False).decode()
            for piece in self.pieces
        ]
        return {"pattern": self.pattern, "eot_id": self.eot_id, "pieces": pieces}

    def tokenizer_json(self) -> Document | None:
        """Return an equivalent BPE. None for an unpublished pattern, whose dialect may differ."""
        if self.pattern not in SCHEMES:
            return None
        pieces = {piece: index for index, piece in enumerate(self.pieces) if piece is not None}
        is_gpt2 = self.pattern == GPT2_PATTERN
        split = GPT2_SPLIT if is_gpt2 else split_by(self.pattern)
        return byte_level_document(pieces, self.eot_id, split)

    @cached_property
    def encoder(self) -> Encode:
        """The encoder of this tokenizer's engine."""
        if self.engine == "gigatoken":
            return gigatoken_of_ranks(self.pieces, SCHEMES[self.pattern])
        ranks = {piece: index for index, piece in enumerate(self.pieces) if piece is not None}
        try:
            pattern = grouped(self.pattern) if self._is_known else self.pattern
            return tiktoken_of(self.name, ranks, pattern)
        except BaseException as error:
            if not isinstance(error, ValueError) and not is_panic(error):
                raise
            raise DataError(
                f"The pattern of the tokenizer {self.name!r} cannot be used: {error}.",
                fix="Correct --pattern.",
            ) from error

    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids of a piece of text."""
        encoder = self.encoder
        try:
            with engine_failures(self.name, offset):
                return encoder(text)
        except ValueError as error:
            raise NotEncodable(
                f"The tokenizer's pattern cannot split the text: {error}.",
                fix="Shorten its longest run of spaces.",
            ) from error

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """Return the next position that no token crosses, by proof or by trial."""
        if self._is_known:
            return known_cut(text, start, end)
        return confirmed_cut(self.encoder, text, start, end)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the pieces."""
        return join_pieces(self._bytes, ids)


TOKENIZER = RankTokenizer


def _ranks(file: TokenizerFile) -> dict[int, bytes]:
    """Return the bytes of each rank in a .tiktoken file.

    Raises: DataError for a malformed line, or a single byte that is missing.
    """
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(file.data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            piece, digits = line.split()
            rank, decoded = int(digits), a2b_base64(piece, strict_mode=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{file.name}, line {number} is not `BASE64 RANK`: {error}.", fix=_WHOLE_FILE
            ) from error
        if not 0 <= rank < MAX_VOCAB_SIZE or rank in ranks:
            reason = "appears twice"
            if rank not in ranks:
                reason = f"is not between 0 and {MAX_VOCAB_SIZE - 1:,}"
            raise DataError(
                f"{file.name}, line {number}: the rank {rank:,} {reason}.", fix=_WHOLE_FILE
            )
        ranks[rank] = decoded
    missing = 256 - sum(len(piece) == 1 for piece in set(ranks.values()))
    if missing:
        raise DataError(f"{file.name} lacks {missing} of the 256 single bytes.", fix=_WHOLE_FILE)
    return ranks


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, progress: Progress = SILENT
) -> RankTokenizer:
    """Return a byte-level BPE of at most `vocab_size` ids, end-of-text included, trained on texts.

    The 256 bytes come first, then the merges in the order found, then end-of-text. Text is split by
    GPT-2's pattern. Equal texts give equal vocabularies.

    Raises: DataError when there is no text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    corpus = [text.encode("utf-8", errors="ignore").decode() for text in texts]
    if not any(corpus):
        raise DataError(
            "The corpus is empty: there is no text to train a tokenizer on.",
            fix="Name a file or directory with text in it.",
        )
    size_mb = sum(map(len, corpus)) / 1e6
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    with progress.task(
        f"Training a tokenizer of {vocab_size:,} tokens on {size_mb:.1f} MB of text"
    ):
        cut = (piece for text in corpus for piece in _pieces(text))
        interruptibly(lambda read: model.train_from_iterator(read, trainer), cut)
    byte_of = byte_level_alphabet()
    ids = model.get_vocab()
    pieces = [
        bytes(byte_of[character] for character in piece)
        for piece in sorted(ids, key=ids.__getitem__)
    ]
    return RankTokenizer(f"bpe-{len(pieces) + 1}", pieces, GPT2_PATTERN, len(pieces))


def interruptibly(work: Callable[[Iterator[str]], object], texts: Iterable[str]) -> None:
    """Call `work(texts)` in a thread and wait for it.

    Python handles signals between the instructions of the main thread, so native code in that
    thread delays them until it returns. After an interruption the texts end with an error, and the
    thread computes on until it needs one or the process ends.

    Raises: the error of `work`.
    """
    done: Future[None] = Future()
    stopped = Event()

    def until_stopped() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise CancelledError
            yield text

    def run() -> None:
        try:
            work(until_stopped())
            done.set_result(None)
        except BaseException as error:  # raised in the caller
            done.set_exception(error)

    try:
        Thread(target=run, name="flatout-native", daemon=True).start()
        done.result()
    except BaseException:
        stopped.set()
        wait([done], timeout=STOP_S)
        raise


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
