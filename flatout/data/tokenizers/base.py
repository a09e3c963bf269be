"""What every tokenizer shares: its one-file form, and the calls that follow from encoding one text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from flatout.errors import DataError

FORMAT = "flatout-tokenizer"
FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"

PIECE_CHARACTERS = 1 << 18
"""Longer texts are encoded a piece at a time, which takes less memory."""
LONGEST_PIECE_CHARACTERS = 1 << 20
"""A text with no place to cut it for so long is refused: what encoding it takes would not be
bounded.
"""

AHEAD_CHARACTERS = 4096
"""How far ahead of a place a tokenizer may look to see whether text may be cut there."""

MOST_IDS = 1 << 24
"""Ids of a vocabulary: tables of them are held. The largest vocabularies in use have a few hundred
thousand.
"""

Ids = np.ndarray[Any, np.dtype[np.uint32]]
Encode = Callable[[str], Ids]


class NotEncodable(DataError):
    """A text that a tokenizer has no ids for: the text's fault, so that the document may be
    skipped.
    """


class StoredTokenizer(ABC):
    """A tokenizer that a JSON document describes whole."""

    kind: ClassVar[str]
    engines: tuple[str, ...]
    """The packages that may encode for it, the fastest first; the last one's ids are the right
    ones. None where numpy does.
    """
    engine: str
    """The one that does. It changes no id and is not part of what is saved."""
    name: str
    vocab_size: int
    eot_id: int
    proven = True
    """Whether every text is encoded in a time and memory that its length bounds; else it depends on
    what is in the file.
    """
    splits_all_text = False
    """Whether its pattern has to match all of a text, which then comes back as it was; other
    tokenizers may normalise it.
    """
    bounds: Callable[[], AbstractContextManager[None]] = nullcontext
    """What surrounds the work on each piece of a text."""

    @abstractmethod
    def encode_piece(self, text: str, start: int) -> Ids:
        """Return the ids of a piece of text, none of them special; `start` is its place in the
        document, for messages.

        Raises: NotEncodable when the text cannot be written in this vocabulary.
        """

    @abstractmethod
    def next_cut(self, text: str, place: int, end: int) -> int | None:
        """Return the first place from `place` up to `end` where cutting the text does not change
        its ids; None when there is none.
        """

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of some ids, which may end inside a character; an unknown id becomes
        U+FFFD.
        """

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return what `from_document` needs, as plain values."""

    @classmethod
    @abstractmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the tokenizer that `document` describes."""

    @final
    def with_engine(self, engine: str) -> Self:
        """Return this tokenizer with another engine."""
        made = object.__new__(type(self))
        made.__dict__ |= {
            key: value for key, value in self.__dict__.items() if key != "encoder"
        } | {"engine": engine}
        return made

    @final
    def encode_stream(self, chunks: Iterable[str]) -> Iterator[Ids]:
        """Yield the ids of one text that comes in chunks, piece by piece, in bounded memory; how it
        is chunked changes no id.

        Raises: NotEncodable when the text cannot be written in this vocabulary, or has no place to
                cut it for too long.
        """
        held, start = "", 0
        for block in _blocks(chunks):
            text, place = held + block, 0
            while True:
                with self.bounds():
                    cut = self._cut(text, place, start + place)
                    ids = None if cut is None else self.encode_piece(text[place:cut], start + place)
                if cut is None or ids is None:
                    break
                yield ids
                place = cut
            held, start = text[place:], start + place
        with self.bounds():
            ids = self.encode_piece(held, start)
        yield ids

    def _cut(self, text: str, place: int, start: int) -> int | None:
        """Return where the piece that begins at `place` ends, None when the rest may be one piece."""
        longest = place + LONGEST_PIECE_CHARACTERS
        cut = (
            self.next_cut(text, place + PIECE_CHARACTERS, min(longest, len(text)))
            if place + PIECE_CHARACTERS < len(text)
            else None
        )
        if cut is None and longest + AHEAD_CHARACTERS < len(text):
            raise NotEncodable(
                f"Nowhere in the {LONGEST_PIECE_CHARACTERS:,} characters from {start} on may text be cut for the tokenizer {self.name!r}.",
                fix="Break up the document, prepare with --tokenizer byte or train:N, or skip such documents with --on-bad-row skip.",
            )
        return cut

    @final
    def encode_pieces(self, text: str) -> Iterator[Ids]:
        """Yield the ids of one text, piece by piece."""
        return self.encode_stream([text])

    @final
    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return [index for ids in self.encode_pieces(text) for index in ids.tolist()]

    @final
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), {"name": self.name} | self.document(), self.engine)

    @cached_property
    def text(self) -> str:
        """What `save` writes."""
        head = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "name": self.name,
        }
        return json.dumps(head | self.document(), ensure_ascii=True) + "\n"

    @final
    def save(self, path: Path) -> None:
        """Write the tokenizer, whole, to one JSON file."""
        path.write_text(self.text, encoding="utf-8")

    @final
    def digest(self) -> str:
        """Return the SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _blocks(chunks: Iterable[str]) -> Iterator[str]:
    """Join chunks to blocks that are worth looking for a cut in, however small they come."""
    waiting: list[str] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= PIECE_CHARACTERS:
            yield "".join(waiting)
            waiting, size = [], 0
    yield "".join(waiting)


def _restored(
    kind: type[StoredTokenizer], document: dict[str, Any], engine: str
) -> StoredTokenizer:
    return kind.from_document(document).with_engine(engine)


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic in Rust, which is no Exception; each package has a class
    of its own for it.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def failures_named(name: str) -> Iterator[None]:
    """Turn what the engine of a tokenizer raises for a text, a bare Exception or a panic, into an
    error that names the tokenizer.

    Raises: NotEncodable.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        fix = "Use another tokenizer, or skip such documents with --on-bad-row skip."
        raise NotEncodable(f"The tokenizer {name!r} fails: {reason}.", fix=fix) from error


def require_ids(name: str, vocab_size: int) -> None:
    """Do nothing when a vocabulary is of a size that can be held.

    Raises: DataError.
    """
    if not 0 < vocab_size <= MOST_IDS:
        raise DataError(
            f"The tokenizer {name!r} has the id {vocab_size - 1:,}; ids are below {MOST_IDS:,}.",
            fix="Number its ids from 0 on, without gaps.",
        )


def join_pieces(table: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """Return the pieces of some ids one after another; an id outside the table becomes U+FFFD."""
    size = len(table)
    return b"".join(table[i] if 0 <= i < size else b"\xef\xbf\xbd" for i in (int(i) for i in ids))


def not_text(error: UnicodeEncodeError, start: int = 0) -> NotEncodable:
    """Return the error for half a surrogate pair: a code point that is no character, so no encoding
    has it.
    """
    code = ord(error.object[error.start])
    return NotEncodable(
        f"Character {start + error.start} is U+{code:04X}, half of a surrogate pair, which is not text.",
        fix="Repair the document, or skip such documents with --on-bad-row skip.",
    )
