"""Ids without text: for tokens whose tokenizer is unknown. Text is the numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from flatout.data.tokenizers.base import (
    MAX_VOCAB_SIZE,
    BoundedSample,
    Document,
    Ids,
    NotEncodable,
    Sample,
    Tokenizer,
)
from flatout.errors import DataError
from flatout.progress import Progress

SPEC = "ids:N"
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class IdsTokenizer(Tokenizer):
    """Text is ids in decimal, separated by spaces. The last id is end-of-text, or the one named."""

    kind: ClassVar[str] = "ids"
    has_text: ClassVar[bool] = False

    def __init__(self, vocab_size: int, eot_id: int) -> None:
        self.name = f"ids:{vocab_size}" + f":{eot_id}" * (eot_id != vocab_size - 1)
        self.vocab_size = vocab_size
        self.eot_id = eot_id

    @classmethod
    def from_corpus(
        cls, argument: str, sample: Sample, train_on: BoundedSample, progress: Progress
    ) -> Tokenizer:
        """Return the tokenizer of `N` ids, or of `N:E`, where E is end-of-text.

        Raises: DataError when these are not such numbers.
        """
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", argument, re.ASCII)
        size = int(match[1]) if match else 0
        eot_id = int(match[2]) if match and match[2] else size - 1
        if not 1 < size <= MAX_VOCAB_SIZE or eot_id >= size:
            raise DataError(
                f"The tokenizer ids:{argument} does not contain a number of ids.",
                fix="Write ids:50257, or ids:50257:50256 if an id other than the last is "
                "end-of-text.",
            )
        return cls(size, eot_id)

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Return the tokenizer that `document` describes."""
        return cls(int(document["vocab_size"]), int(document["eot_id"]))

    def document(self) -> Document:
        """Return the numbers."""
        return {"vocab_size": self.vocab_size, "eot_id": self.eot_id}

    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids that a piece of text lists.

        Raises: NotEncodable for a word that is not an id, or that is end-of-text.
        """
        ids = []
        for match in re.finditer(r"\S+", text):
            index = int(match[0]) if _NUMBER.fullmatch(match[0]) else self.vocab_size
            if index >= self.vocab_size or index == self.eot_id:
                raise NotEncodable(
                    f"Character {offset + match.start()}, {match[0][:20]!r}, is not an id of the "
                    f"tokenizer {self.name}: it has no text, only numbers.",
                    fix=f"Write ids from 0 to {self.vocab_size - 1}, separated by spaces.",
                )
            ids.append(index)
        return np.array(ids, np.uint32)

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """Return the position after the next space."""
        match = re.compile(r"\s").search(text, start, end)
        return match.end() if match else None

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the numbers, each followed by a space."""
        return b"".join(b"%d " % index for index in ids)


TOKENIZER = IdsTokenizer
