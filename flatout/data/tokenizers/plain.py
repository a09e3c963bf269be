"""The two tokenizers that need no package: one id a character, one id a byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from flatout.data.tokenizers.base import (
    END_OF_TEXT,
    Ids,
    NotEncodable,
    StoredTokenizer,
    join_pieces,
    not_text,
)
from flatout.errors import DataError
from flatout.progress import Task

_CODE_POINTS = 0x110000


class CharTokenizer(StoredTokenizer):
    """One id a character, in the order of their code points; end-of-text comes last."""

    kind: ClassVar[str] = "char"
    engines: tuple[str, ...] = ()

    def __init__(self, characters: str) -> None:
        self.engine = ""
        self.name = "char"
        self.characters = characters
        self.eot_id = len(characters)
        self.vocab_size = len(characters) + 1
        self._bytes = [character.encode() for character in characters] + [END_OF_TEXT.encode()]
        codes = _code_points(characters)
        self._id_of = np.full(int(codes.max(initial=0)) + 2, self.eot_id, np.uint32)
        self._id_of[codes] = np.arange(len(codes), dtype=np.uint32)

    def encode_piece(self, text: str, start: int) -> Ids:
        """Return the ids of a piece of text.

        Raises: NotEncodable for a character that the vocabulary does not have.
        """
        codes = _code_points(text, start=start)
        ids: Ids = self._id_of.take(codes, mode="clip")
        if len(ids) and int(ids.max()) == self.eot_id:
            place = int((ids == self.eot_id).argmax())
            named = f"Character {start + place}, {text[place]!r} (U+{ord(text[place]):04X})"
            raise NotEncodable(
                f"{named}, is not among the {len(self.characters)} of this char tokenizer.",
                fix="Leave it out, or prepare with --tokenizer byte or train:N, which can write any text.",
            )
        return ids

    def next_cut(self, text: str, place: int, end: int) -> int:
        """Return `place`: a text may be cut anywhere."""
        return place

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the UTF-8 of the characters."""
        return join_pieces(self._bytes, ids)

    def document(self) -> dict[str, Any]:
        """Return the characters."""
        return {"characters": self.characters}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the tokenizer that `document` describes."""
        return cls(str(document["characters"]))


class ByteTokenizer(StoredTokenizer):
    """One id a UTF-8 byte; end-of-text is 256."""

    kind: ClassVar[str] = "byte"
    engines: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.engine = ""
        self.name = "byte"
        self.eot_id = 256
        self.vocab_size = 257
        self._bytes = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]

    def encode_piece(self, text: str, start: int) -> Ids:
        """Return the ids of a piece of text."""
        try:
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        except UnicodeEncodeError as error:
            raise not_text(error, start) from error

    def next_cut(self, text: str, place: int, end: int) -> int:
        """Return `place`: a text may be cut anywhere."""
        return place

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes."""
        return join_pieces(self._bytes, ids)

    def document(self) -> dict[str, Any]:
        """Return nothing: there is only one."""
        return {}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the tokenizer that `document` describes."""
        return cls()


def characters_of(texts: Iterable[str], task: Task) -> str:
    """Return every character of the texts once, sorted; half surrogate pairs are not characters.

    Raises: DataError when there is none.
    """
    seen = np.zeros(_CODE_POINTS, np.bool_)
    for text in texts:
        seen[_code_points(text, errors="ignore")] = True
        task.advance(len(text) / 1e6)
    if not seen.any():
        raise DataError(
            "The corpus is empty: it has no character to make a vocabulary of.",
            fix="Name a file or folder with text in it.",
        )
    return "".join(chr(code) for code in np.flatnonzero(seen))


def _code_points(text: str, errors: str = "strict", start: int = 0) -> Ids:
    try:
        return np.frombuffer(text.encode("utf-32-le", errors=errors), np.dtype("<u4"))
    except UnicodeEncodeError as error:
        raise not_text(error, start) from error
