"""One id per UTF-8 byte. Needs no package and no corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from flatout.data.tokenizers.base import (
    END_OF_TEXT,
    BoundedSample,
    Document,
    Ids,
    Sample,
    Tokenizer,
    join_pieces,
    not_text,
)
from flatout.data.tokenizers.byte_level import UNSPLIT, byte_level_document
from flatout.progress import Progress

SPEC = "byte"


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte. End-of-text is 256."""

    kind: ClassVar[str] = "byte"

    def __init__(self) -> None:
        self.name = "byte"
        self.eot_id = 256
        self.vocab_size = 257
        self._bytes = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]

    @classmethod
    def from_corpus(
        cls, argument: str, sample: Sample, train_on: BoundedSample, progress: Progress
    ) -> Tokenizer:
        """Return the only byte tokenizer."""
        return cls()

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Return the only byte tokenizer."""
        return cls()

    def document(self) -> Document:
        """Return an empty document: there is only one byte tokenizer."""
        return {}

    def tokenizer_json(self) -> Document:
        """Return a byte-level BPE without merges."""
        pieces = {bytes([value]): value for value in range(256)}
        return byte_level_document(pieces, self.eot_id, UNSPLIT)

    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids of a piece of text."""
        try:
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        except UnicodeEncodeError as error:
            raise not_text(error, offset) from error

    def next_cut(self, text: str, start: int, end: int) -> int:
        """Return `start`: a text can be cut anywhere."""
        return start

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`."""
        return join_pieces(self._bytes, ids)


TOKENIZER = ByteTokenizer
