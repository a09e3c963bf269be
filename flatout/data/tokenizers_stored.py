"""What every tokenizer shares: its one-file form, and the calls that follow from encoding one text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from flatout.errors import DataError

FORMAT = "flatout-tokenizer"
FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"

PIECE_CHARACTERS = 1 << 20
"""Longer texts are encoded a piece at a time, which takes less memory."""

Ids = np.ndarray[Any, np.dtype[np.uint32]]


class StoredTokenizer(ABC):
    """A tokenizer that a JSON document describes whole."""

    kind: ClassVar[str]
    name: str
    vocab_size: int
    eot_id: int

    @abstractmethod
    def encode_piece(self, text: str, start: int) -> Ids:
        """Return the ids of a piece of text, none of them special; `start` is its place in the document, for messages.

        Raises: DataError when the text cannot be written in this vocabulary.
        """

    @abstractmethod
    def next_cut(self, text: str, place: int) -> int:
        """Return the first place from `place` on where cutting the text does not change its ids; its end when there is none."""

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of some ids, which may end inside a character; an unknown id becomes U+FFFD."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return what `from_document` needs, as plain values."""

    @classmethod
    @abstractmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the tokenizer that `document` describes."""

    @final
    def encode_pieces(self, text: str) -> Iterator[Ids]:
        """Yield the ids of one text, piece by piece."""
        start = 0
        while start < len(text) or start == 0:
            whole = len(text) - start <= PIECE_CHARACTERS
            end = len(text) if whole else self.next_cut(text, start + PIECE_CHARACTERS)
            yield self.encode_piece(text[start:end], start)
            start = max(end, 1)

    @final
    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return [index for ids in self.encode_pieces(text) for index in ids.tolist()]

    @final
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_document, ({"name": self.name} | self.document(),)

    @cached_property
    def text(self) -> str:
        """What `save` writes."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "kind": self.kind, "name": self.name}
        return json.dumps(head | self.document(), ensure_ascii=True) + "\n"

    @final
    def save(self, path: Path) -> None:
        """Write the tokenizer, whole, to one JSON file."""
        path.write_text(self.text, encoding="utf-8")

    @final
    def digest(self) -> str:
        """Return the SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def join_pieces(table: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """Return the pieces of some ids one after another; an id outside the table becomes U+FFFD."""
    size = len(table)
    return b"".join(table[i] if 0 <= i < size else b"\xef\xbf\xbd" for i in (int(i) for i in ids))


def not_text(error: UnicodeEncodeError, start: int = 0) -> DataError:
    """Return the error for half a surrogate pair: a code point that is no character, so no encoding has it."""
    code = ord(error.object[error.start])
    return DataError(
        f"Character {start + error.start} is U+{code:04X}, half of a surrogate pair, which is not text.",
        fix="Repair the document, or skip such documents with --on-bad-row skip.",
    )
