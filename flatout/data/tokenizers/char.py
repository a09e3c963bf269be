"""One id per character of the corpus. Needs no package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

import numpy as np

from flatout.data.tokenizers.base import (
    END_OF_TEXT,
    BoundedSample,
    Document,
    Ids,
    NotEncodable,
    Sample,
    Tokenizer,
    join_pieces,
    not_text,
)
from flatout.data.tokenizers.byte_level import bpe_document
from flatout.errors import DataError
from flatout.progress import Progress, Task

SPEC = "char"
_CODE_POINTS = 0x110000


class CharTokenizer(Tokenizer):
    """One id per character, in the order of code points. End-of-text is last."""

    kind: ClassVar[str] = "char"
    needs_corpus = True

    def __init__(self, characters: str) -> None:
        self.name = "char"
        self.characters = characters
        self.eot_id = len(characters)
        self.vocab_size = len(characters) + 1
        self._bytes = [character.encode() for character in characters] + [END_OF_TEXT.encode()]
        codes = _code_points(characters)
        self._id_of = np.full(int(codes.max(initial=0)) + 2, self.eot_id, np.uint32)
        self._id_of[codes] = np.arange(len(codes), dtype=np.uint32)

    @classmethod
    def from_corpus(
        cls, argument: str, sample: Sample, train_on: BoundedSample, progress: Progress
    ) -> Tokenizer:
        """Return the tokenizer of all characters of the corpus."""
        with progress.task("Collecting characters", unit="MB") as task:
            return cls(_characters_of(sample(None), task))

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Return the tokenizer that `document` describes."""
        return cls(str(document["characters"]))

    def document(self) -> Document:
        """Return the characters."""
        return {"characters": self.characters}

    def tokenizer_json(self) -> Document:
        """Return a BPE of characters without merges. It drops characters that it does not know."""
        ids = {character: index for index, character in enumerate(self.characters)}
        decoder: Document = {"type": "Fuse"}
        return bpe_document(ids, [], self.eot_id, pre_tokenizer=None, decoder=decoder)

    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids of a piece of text.

        Raises: NotEncodable for a character that is not in the vocabulary.
        """
        ids: Ids = self._id_of.take(_code_points(text, offset=offset), mode="clip")
        if len(ids) and int(ids.max()) == self.eot_id:
            index = int((ids == self.eot_id).argmax())
            character = f"{text[index]!r} (U+{ord(text[index]):04X})"
            raise NotEncodable(
                f"Character {offset + index}, {character}, is not one of the "
                f"{len(self.characters)} characters of this char tokenizer.",
                fix="Remove it, or prepare with --tokenizer byte or train:N, "
                "which can encode any text.",
            )
        return ids

    def next_cut(self, text: str, start: int, end: int) -> int:
        """Return `start`: a text can be cut anywhere."""
        return start

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the UTF-8 bytes of the characters."""
        return join_pieces(self._bytes, ids)


TOKENIZER = CharTokenizer


def _characters_of(texts: Iterable[str], task: Task) -> str:
    """Return every distinct character of the texts, sorted, without halves of surrogate pairs.

    Raises: DataError when there is none.
    """
    seen = np.zeros(_CODE_POINTS, np.bool_)
    for text in texts:
        seen[_code_points(text, errors="ignore")] = True
        task.advance(len(text) / 1e6)
    if not seen.any():
        raise DataError(
            "The corpus is empty: there are no characters to build a vocabulary from.",
            fix="Name a file or directory with text in it.",
        )
    return "".join(map(chr, np.flatnonzero(seen)))


def _code_points(text: str, errors: str = "strict", offset: int = 0) -> Ids:
    try:
        return np.frombuffer(text.encode("utf-32-le", errors=errors), np.dtype("<u4"))
    except UnicodeEncodeError as error:
        raise not_text(error, offset) from error
