"""The base class of all tokenizers: the JSON format, encoding in pieces, cuts, common errors."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray

from flatout.data.conversation.rendering import Example
from flatout.data.sources.long import chunks_of
from flatout.errors import DataError
from flatout.progress import Progress
from flatout.storage.json_io import JsonObject

FORMAT = "flatout-tokenizer"
FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"

PIECE_CHARACTERS = 1 << 18
"""Longer texts are encoded in pieces of this size, to save memory."""
MAX_PIECE_CHARACTERS = 1 << 20
"""A text that cannot be cut within this length is rejected: encoding it would have no bound."""
LOOKAHEAD_CHARACTERS = 4096
"""Characters after a cut that a tokenizer may inspect to decide whether the cut is safe."""
MAX_VOCAB_SIZE = 1 << 24
"""Tables of this length must fit in memory. Real vocabularies have a few hundred thousand ids."""
UNKNOWN = "\ufffd".encode()
"""The bytes that an unknown id decodes to."""
SKIP_DOCUMENTS = "skip such documents with --on-bad-row skip."

CUT = re.compile(r"(?<=\S)(?= )|(?<=[A-Za-z0-9])(?=[\r\n])|(?<=\S\n)(?=[^\s/])")
r"""Positions where a text can be cut without changing its ids, for the known patterns.

Those (GPT-2's, cl100k's and its relatives in Llama 3 and Qwen 2, o200k's) look ahead and never
behind. When a split falls on a cut, the right side therefore splits as before. The left side does
too if its last piece ends in the same way without what follows. By the patterns, both hold
- before a space that follows a non-space, since no alternative matches across the two,
- before a line end that follows an ASCII letter or digit, for the same reason,
- after a single line end and before a character that is neither white space nor a slash, since only
  o200k continues after a line end, and only with a slash.
Python's \s includes all white space of Unicode.
"""
MAX_TRIES = 64
"""Positions tried before a text is considered impossible to cut."""

Ids = NDArray[np.uint32]
Mask = NDArray[np.uint8]
Places = NDArray[np.int64]
Encode = Callable[[str], Ids]
Sample = Callable[[int | None], Iterable[str]]
"""Returns about this many bytes of the corpus, evenly spread. None means the whole corpus."""
BoundedSample = Callable[[int], Iterable[str]]
Document = JsonObject
"""A parsed JSON file, either our own or a tokenizer.json, whose schema `tokenizers` defines."""


class NotEncodable(DataError):
    """A tokenizer has no ids for a text. The text is at fault, so its document may be skipped."""

    reason = "cannot be tokenised"
    """Reason under which the row is counted."""


class WritesSpecial(NotEncodable):
    """A text from a row in which the tokenizer finds a special token."""

    reason = "contains a special token"


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer file that another tool wrote."""

    name: str
    """Its name in error messages."""
    data: bytes = b""
    document: Document | None = None
    """The parsed content of a JSON file."""
    pattern: str | None = None
    """The regular expression that splits text."""
    end_of_text: str | None = None
    """The name of the end-of-text token."""
    named: Mapping[str, str] | None = None
    """Special tokens that the files beside it name, such as bos_token."""
    stated: tuple[str, str, str | int] | None = None
    """Where a file beside it states the end-of-text token: file, key, and a name or an id."""

    @property
    def stem(self) -> str:
        """The file name without directory and suffix."""
        return self.name.rpartition("/")[2].removesuffix(".json").removesuffix(".tiktoken")


class Tokenizer(ABC):
    """Converts text to ids below `vocab_size` and back. One JSON document describes it completely.

    Text is never encoded as `eot_id` or as another special id. The file of a kind assigns its class
    to TOKENIZER. A kind that `--tokenizer` selects by name also assigns SPEC (`"char"`, or
    `"train:N"` with an argument), and one that reads another tool's files assigns SUFFIX.
    LISTED_AS is what `flatout list tokenizers` shows instead of SPEC.
    """

    kind: ClassVar[str]
    """The name of the Python file that defines this kind. It is stored on disk."""
    needs_corpus: ClassVar[bool] = False
    """Whether `from_corpus` reads the corpus."""
    engines: tuple[str, ...] = ()
    """Packages that can encode for it, fastest first. The last one defines the correct ids.

    Empty when numpy is enough.
    """
    engine: str = ""
    """The package in use. It changes no id and is not saved."""
    name: str
    vocab_size: int
    eot_id: int
    """End-of-text, which packing appends to each document."""
    has_text: ClassVar[bool] = True
    """Whether ids stand for text, so that the bytes of a text can be counted."""

    @classmethod
    def from_corpus(
        cls, argument: str, sample: Sample, train_on: BoundedSample, progress: Progress
    ) -> Tokenizer:
        """Return the tokenizer that SPEC names. `argument` is the part of it after the colon."""
        raise NotImplementedError

    @classmethod
    def from_file(cls, file: TokenizerFile) -> Tokenizer:
        """Return the tokenizer in a file that another tool wrote. Its name ends in SUFFIX."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def from_document(cls, document: Document) -> Self:
        """Return the tokenizer that `document` describes."""

    @abstractmethod
    def document(self) -> Document:
        """Return the values that `from_document` needs."""

    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens that a chat template may write, with their ids."""
        return {END_OF_TEXT: self.eot_id}

    def named_tokens(self) -> dict[str, tuple[str, int]]:
        """Return the tokens that its origin names, such as bos_token, each with its id."""
        return {}

    def tokenizer_json(self) -> Document | None:
        """Return a tokenizer.json with the same ids, for other tools. None if there is none."""
        return None

    @abstractmethod
    def encode_piece(self, text: str, offset: int) -> Ids:
        """Return the ids of a piece of text, none of them special.

        `offset` is the position of the piece in its document, for error messages.

        Raises: NotEncodable when the vocabulary cannot express the text.
        """

    @abstractmethod
    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """Return the first position in `start`..`end` where cutting the text changes no id.

        None when there is no such position.
        """

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`, which may end inside a character.

        An unknown id becomes U+FFFD.
        """

    @final
    def with_engine(self, engine: str) -> Self:
        """Return a copy of this tokenizer that uses a different engine."""
        copy = object.__new__(type(self))
        copy.__dict__ |= self.__dict__ | {"engine": engine}
        copy.__dict__.pop("encoder", None)
        return copy

    @final
    def encode_stream(self, chunks: Iterable[str]) -> Iterator[Ids]:
        """Yield the ids of one text that arrives in chunks, piece by piece, in bounded memory.

        The ids do not depend on the chunks.

        Raises: NotEncodable when the vocabulary cannot express the text, or the text is too long
                without a position where it can be cut.
        """
        pending, offset = "", 0
        for block in _blocks(chunks):
            text, start = pending + block, 0
            while (piece := self._next_piece(text, start, offset)) is not None:
                ids, start = piece
                yield ids
            pending, offset = text[start:], offset + start
        yield self.encode_piece(pending, offset)

    def _next_piece(self, text: str, start: int, offset: int) -> tuple[Ids, int] | None:
        """Return the ids of the piece that starts at `start`, and its end.

        None when the rest of the text may be one piece.
        """
        longest, first = start + MAX_PIECE_CHARACTERS, start + PIECE_CHARACTERS
        cut = None
        if first < len(text):
            cut = self.next_cut(text, first, min(longest, len(text)))
        if cut is not None:
            return self.encode_piece(text[start:cut], offset + start), cut
        if longest + LOOKAHEAD_CHARACTERS < len(text):
            raise NotEncodable(
                f"The tokenizer {self.name!r} cannot cut the text anywhere in the "
                f"{MAX_PIECE_CHARACTERS:,} characters from {offset + start} on.",
                fix="Break up the document, prepare with --tokenizer byte or train:N, or "
                + SKIP_DOCUMENTS,
            )
        return None

    @final
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [index for ids in self.encode_stream([text]) for index in ids.tolist()]

    def encode_example(self, example: Example) -> tuple[Ids, Mask]:
        """Return the ids of an example, and a mask that is 1 for those that the loss counts.

        The text between the names of special tokens is encoded as a whole.

        Shapes:  returns (T,), (T,).
        Raises:  NotEncodable when the vocabulary cannot express the text.
        """
        text, targets = example.text, example.targets
        edges = {0, len(text), *chain.from_iterable(example.names or ())}
        ids = np.concatenate([np.zeros(0, np.uint32), *self._parts(example, edges)])
        sizes = self._num_bytes[ids]
        if sizes.sum() == len(text.encode()):
            if not text.isascii():
                targets = tuple(
                    (len(text[:start].encode()), len(text[:stop].encode()))
                    for start, stop in targets
                )
            stops = np.cumsum(sizes)
            return ids, counted(stops - sizes, stops, targets)
        # the ids do not show where each begins: what the loss counts is encoded separately
        edges.update(chain.from_iterable(targets))
        parts, places = self._parts(example, edges), np.array(sorted(edges))
        mask = counted(places[:-1], places[1:], targets)
        return np.concatenate(parts), np.repeat(mask, [len(part) for part in parts])

    def _parts(self, example: Example, edges: Iterable[int]) -> list[Ids]:
        """Return the ids of the parts of a text between some edges."""
        names, special = {*(example.names or ())}, self.special_tokens()
        return [
            np.array([special[example.text[start:stop]]], np.uint32)
            if (start, stop) in names
            else np.concatenate([*self.encode_stream(chunks_of(example.text[start:stop]))])
            for start, stop in pairwise(sorted(edges))
        ]

    @cached_property
    def _num_bytes(self) -> Places:
        """The number of bytes that each id stands for."""
        return np.array([len(self.decode_bytes([index])) for index in range(self.vocab_size)])

    @final
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[object, ...]]:
        return _unpickle, (type(self), {"name": self.name} | self.document(), self.engine)

    @cached_property
    def text(self) -> str:
        """The content of the file that `save` writes."""
        head = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "name": self.name,
        }
        return json.dumps(head | self.document(), ensure_ascii=True) + "\n"

    @final
    def save(self, path: Path) -> None:
        """Write the complete tokenizer to one JSON file."""
        path.write_text(self.text, encoding="utf-8")

    @final
    def digest(self) -> str:
        """Return the SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def counted(starts: Places, stops: Places, targets: Iterable[Sequence[int]]) -> Mask:
    """Return 1 for each token with a character in a target, else 0.

    A token without characters belongs to the text that follows it.

    Shapes:  starts (T,), stops (T,); returns (T,).
    """
    mask = np.zeros(len(starts), np.bool_)
    for first, last in targets:
        mask |= (starts < last) & ((stops > first) | (starts >= first))
    return mask.astype(np.uint8)


def _blocks(chunks: Iterable[str]) -> Iterator[str]:
    """Join small chunks into blocks of at least PIECE_CHARACTERS, to search for fewer cuts."""
    waiting: list[str] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= PIECE_CHARACTERS:
            yield "".join(waiting)
            waiting, size = [], 0
    yield "".join(waiting)


def _unpickle(kind: type[Tokenizer], document: Document, engine: str) -> Tokenizer:
    return kind.from_document(document).with_engine(engine)


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust panic, which is not an Exception.

    Each package defines its own class for it.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def engine_failures(name: str, offset: int = 0) -> Iterator[None]:
    """Convert a bare Exception or a panic of an engine to an error that names the tokenizer.

    `offset` is the position of the text in its document, for `not_text`.

    Raises: NotEncodable.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise not_text(error, offset) from error
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise NotEncodable(
            f"The tokenizer {name!r} fails: {reason}.",
            fix=f"Use a different tokenizer, or {SKIP_DOCUMENTS}",
        ) from error


def require_ids(name: str, vocab_size: int) -> None:
    """Check that tables of the vocabulary fit in memory.

    Raises: DataError.
    """
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"The tokenizer {name!r} has the id {vocab_size - 1:,}. "
            f"Ids must be below {MAX_VOCAB_SIZE:,}.",
            fix="Number its ids from 0 without gaps.",
        )


def join_pieces(table: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """Return the concatenated bytes of `ids`. An id outside the table becomes U+FFFD."""
    size = len(table)
    return b"".join([table[i] if 0 <= i < size else UNKNOWN for i in map(int, ids)])


def not_text(error: UnicodeEncodeError, offset: int = 0) -> NotEncodable:
    """Return the error for half of a surrogate pair, which no encoding can express."""
    code = ord(error.object[error.start])
    return NotEncodable(
        f"Character {offset + error.start} is U+{code:04X}, half of a surrogate pair, "
        "which is not text.",
        fix=f"Repair the document, or {SKIP_DOCUMENTS}",
    )


def known_cut(text: str, start: int, end: int) -> int | None:
    """Return the first position in `start`..`end` that no known pattern matches across."""
    match = CUT.search(text, start, end)
    return match.start() if match else None


def confirmed_cut(encode: Encode, text: str, start: int, end: int) -> int | None:
    """Return the first position where both sides encode separately to the ids of the whole.

    Positions near the end of the text are not tried, so that text after it cannot matter.
    """
    last = min(end, len(text) - LOOKAHEAD_CHARACTERS)
    for match in islice(CUT.finditer(text, start, last), MAX_TRIES):
        cut = match.start()
        right = text[cut : cut + LOOKAHEAD_CHARACTERS]
        right_ids = encode(right)
        lefts = (text[max(cut - LOOKAHEAD_CHARACTERS // part, 0) : cut] for part in (1, 2))
        if all(
            np.array_equal(np.concatenate([encode(left), right_ids]), encode(left + right))
            for left in lefts
        ):
            return cut
    return None
