"""Byte-level BPE by ranks, encoded by tiktoken: trained on the corpus here, or read from a
.tiktoken file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from flatout.data.tokenizers.base import (
    END_OF_TEXT,
    MOST_IDS,
    Encode,
    Ids,
    NotEncodable,
    StoredTokenizer,
    failures_named,
    is_panic,
    join_pieces,
    not_text,
    require_ids,
)
from flatout.data.tokenizers.cut_points import confirmed_cut, known_cut
from flatout.data.tokenizers.engines import gigatoken_of_ranks, tiktoken_of
from flatout.errors import DataError
from flatout.progress import SILENT, Progress

GPT2_PATTERN = r"'(?:[sdmt]|ll|re|ve)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""Where GPT-2 splits text before merging, with possessive quantifiers, so that long runs need no
backtracking.
"""

_CL100K = r"'(?i:[sdmt]|ll|re|ve)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
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
"""What gigatoken calls the known patterns."""


TRAINING_PIECE_CHARACTERS = 1 << 15
LONGEST_TRAINING_PIECE_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Known:
    """A published .tiktoken file: what the file itself does not say."""

    name: str
    pattern: str
    eot_id: int


KNOWN = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": Known(
        "gpt2", GPT2_PATTERN, 50256
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": Known(
        "p50k_base", GPT2_PATTERN, 50256
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": Known(
        "cl100k_base", _CL100K, 100257
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": Known(
        "o200k_base", _O200K, 199999
    ),
}
"""By the SHA-256 of the file."""


class RankTokenizer(StoredTokenizer):
    """Byte-level BPE: text is split by a pattern, then adjacent pieces merge, the lowest resulting
    id first.

    `pieces` holds the bytes of each id; None where an id is not used, as for end-of-text.
    """

    kind: ClassVar[str] = "bpe"
    splits_all_text = True
    engines: tuple[str, ...] = ("gigatoken", "tiktoken")

    def __init__(
        self, name: str, pieces: Sequence[bytes | None], pattern: str, eot_id: int
    ) -> None:
        self.engine = self.engines[-1]
        self.name = name
        self.pieces = list(pieces)
        self.pattern = pattern
        self.eot_id = eot_id
        self.vocab_size = max(len(pieces), eot_id + 1)
        require_ids(name, self.vocab_size if eot_id >= 0 else eot_id + 1)
        self.proven = pattern in SCHEMES
        unused = b"\xef\xbf\xbd"
        self._bytes = [unused if piece is None else piece for piece in pieces] + [unused] * (
            self.vocab_size - len(pieces)
        )
        self._bytes[eot_id] = END_OF_TEXT.encode()

    @cached_property
    def encoder(self) -> Encode:
        """What encodes, by the engine of this tokenizer."""
        if self.engine == "gigatoken":
            return gigatoken_of_ranks(self.pieces, SCHEMES.get(self.pattern))
        ranks = {piece: index for index, piece in enumerate(self.pieces) if piece is not None}
        try:
            return tiktoken_of(self.name, ranks, self.pattern)
        except BaseException as error:
            if not isinstance(error, ValueError) and not is_panic(error):
                raise
            raise DataError(
                f"The pattern of the tokenizer {self.name!r} cannot be used: {error}.",
                fix="Correct --pattern.",
            ) from error

    def encode_piece(self, text: str, start: int) -> Ids:
        """Return the ids of a piece of text."""
        encoder = self.encoder
        try:
            with failures_named(self.name):
                return encoder(text)
        except UnicodeEncodeError as error:
            raise not_text(error, start) from error
        except ValueError as error:
            raise NotEncodable(
                f"The text cannot be split by the tokenizer's pattern: {error}.",
                fix="Shorten its longest run of spaces.",
            ) from error

    def next_cut(self, text: str, place: int, end: int) -> int | None:
        """Return the next place that no token crosses: by the known patterns, or as tried out for
        another.
        """
        return (
            known_cut(text, place, end)
            if self.pattern in SCHEMES
            else confirmed_cut(self.encoder, text, place, end)
        )

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the pieces."""
        return join_pieces(self._bytes, ids)

    def document(self) -> dict[str, Any]:
        """Return the pattern, end-of-text, and every piece as base64."""
        pieces = [
            None if piece is None else base64.b64encode(piece).decode() for piece in self.pieces
        ]
        return {"pattern": self.pattern, "eot_id": self.eot_id, "pieces": pieces}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the tokenizer that `document` describes."""
        pieces = [
            None if piece is None else base64.b64decode(piece) for piece in document["pieces"]
        ]
        return cls(str(document["name"]), pieces, str(document["pattern"]), int(document["eot_id"]))


def read_tiktoken(data: bytes, name: str, *, pattern: str | None = None) -> RankTokenizer:
    """Return the tokenizer in the bytes of a .tiktoken file: a line an id, base64 and rank.

    Raises: DataError when it is not one, or its pattern is neither known nor given.
    """
    if pattern == "":
        raise DataError(
            "--pattern '' splits no text.",
            fix="Give the regular expression that the tokenizer was trained with.",
        )
    known = KNOWN.get(hashlib.sha256(data).hexdigest())
    if known is None and pattern is None:
        raise DataError(
            f"{name} is not a .tiktoken file that is known here, so how it splits text is not known.",
            fix="Give its regular expression with --pattern; a file that should be known may be damaged.",
        )
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            piece, digits = line.split()
            rank, decoded = int(digits), base64.b64decode(piece, validate=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{name}, line {number} is not `BASE64 RANK`: {error}.",
                fix="Give a whole .tiktoken file.",
            ) from error
        if not 0 <= rank < MOST_IDS or rank in ranks:
            reason = "is there twice" if rank in ranks else f"is not between 0 and {MOST_IDS - 1:,}"
            raise DataError(
                f"{name}, line {number}: the rank {rank:,} {reason}.",
                fix="Give a whole .tiktoken file.",
            )
        ranks[rank] = decoded
    missing = 256 - sum(len(piece) == 1 for piece in set(ranks.values()))
    if missing:
        raise DataError(
            f"{name} lacks {missing} of the 256 single bytes.", fix="Give a whole .tiktoken file."
        )
    pieces = [ranks.get(rank) for rank in range(max(ranks) + 1)]
    if known is not None:
        return RankTokenizer(known.name, pieces, pattern or known.pattern, known.eot_id)
    return RankTokenizer(
        name.rpartition("/")[2].removesuffix(".tiktoken"), pieces, str(pattern), len(pieces)
    )


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, progress: Progress = SILENT
) -> RankTokenizer:
    """Return a byte-level BPE of at most `vocab_size` ids, end-of-text included, trained on the
    texts.

    The 256 bytes come first, then the merges in the order found, end-of-text last. Text is split as
    GPT-2 does. Equal texts give equal vocabularies.

    Raises: DataError when there is no text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    held = [text.encode("utf-8", errors="ignore").decode() for text in texts]
    if not any(held):
        raise DataError(
            "The corpus is empty: there is nothing to train a tokenizer on.",
            fix="Name a file or folder with text in it.",
        )
    size_mb = sum(len(text) for text in held) / 1e6
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
        model.train_from_iterator((piece for text in held for piece in _pieces(text)), trainer)
    byte_of = byte_level_alphabet()
    vocabulary = sorted(model.get_vocab().items(), key=lambda item: item[1])
    pieces = [bytes(byte_of[character] for character in piece) for piece, _ in vocabulary]
    return RankTokenizer(f"bpe-{len(pieces) + 1}", pieces, GPT2_PATTERN, len(pieces))


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces that split as the whole does; where it cannot be cut, no more than a
    piece may be long.

    The trainer takes a hundred bytes for each character of a piece, and for a word the square of
    its length in time.
    """
    place = 0
    while (cut := known_cut(text, place + TRAINING_PIECE_CHARACTERS, len(text))) is not None:
        yield text[place : min(cut, place + LONGEST_TRAINING_PIECE_CHARACTERS)]
        place = cut
    yield text[place : place + LONGEST_TRAINING_PIECE_CHARACTERS]


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary: printable Latin-1 stands
    for itself, the rest from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(0x100 + index): value for index, value in enumerate(rest)
    }
