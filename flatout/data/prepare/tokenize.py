"""Documents to packed tokens: which go to which split, each followed by end-of-text, no padding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from flatout.data.store.manifest import SPLITS, SkippedEntry, SplitName
from flatout.data.tokenizers.base import PIECE_CHARACTERS, NotEncodable
from flatout.errors import without_secrets
from flatout.sources import FIRST_NAMED, BadRow, Document, LeftOut, ReadTask, Row, RowLocation
from flatout.sources.long import LongText, Text, chunks_of

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
OnBadRow = Literal["raise", "skip"]
Duplicates = Literal["keep", "drop"]

MARK = np.dtype([("hash", "<u8", 2), ("text_bytes", "<i8")])
"""What tells a document from others: half the SHA-256 of its prompt's length, prompt and text; and
the bytes of its text.
"""

HELD_TOKENS = 1 << 20
"""So many tokens of a split are held at most before they are written, whatever there is to pack."""
HELD_CHARACTERS = 1 << 20
"""A text up to so long is tokenised whole before any of it is packed; of a longer one, piece by
piece.
"""
PIECES_TOLD = 32
"""Progress is told after so many pieces of a text."""


@dataclass(frozen=True)
class ByHash:
    """`hash F`: a document is validation when the first 8 bytes of its text's SHA-256, as a
    fraction of 2^64, are below F.

    It depends on the text alone: equal documents share a split, and a document keeps its split when
    others come or go.
    """

    fraction: float

    def pieces(self, text: Text, ordinal: int) -> Iterator[tuple[SplitName, Text]]:
        """Yield the document whole, with its split."""
        yield ("val" if hash_fraction(text) < self.fraction else "train"), text


@dataclass(frozen=True)
class ByPlace:
    """`tail F`: validation begins in document number `document`, at its character `character`; each
    side of a cut is a document.
    """

    document: int
    character: int

    def pieces(self, text: Text, ordinal: int) -> Iterator[tuple[SplitName, Text]]:
        """Yield the document whole, or the two sides of the one that is cut, each with its split."""
        if ordinal == self.document and self.character:
            yield "train", text[: self.character]
            yield "val", text[self.character :]
        else:
            yield ("train" if ordinal < self.document else "val"), text


@dataclass(frozen=True)
class Whole:
    """`named`: every document is of one split."""

    split: SplitName

    def pieces(self, text: Text, ordinal: int) -> Iterator[tuple[SplitName, Text]]:
        """Yield the document whole, with the split."""
        yield self.split, text


Assignment = ByHash | ByPlace | Whole


def sha256_of(text: Text) -> bytes:
    """Return the SHA-256 of the text's UTF-8."""
    return (
        text.sha256
        if isinstance(text, LongText)
        else hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    )


def hash_fraction(text: Text) -> float:
    """Return where the text's hash falls in [0, 1)."""
    digest = sha256_of(text)
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Job:
    """What one process is to pack: a part, or the beginning of it."""

    part: ReadTask
    first: int = 0
    """Number of the part's first document in the corpus; only `tail` asks for it."""
    take: int | None = None
    """Documents to take; None takes all."""
    last_bytes: int | None = None
    """UTF-8 bytes to keep of the last document taken; None keeps it whole."""
    assignment: Assignment | None = None
    """Which split its documents go to; None leaves it to the split rule of the whole data set."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows up to the last document to take."""
        taken = 0
        rows = self.part.rows() if self.take is None or self.take > 0 else iter(())
        for row in rows:
            if isinstance(row, Document):
                taken += 1
                if taken == self.take and self.last_bytes is not None:
                    row = replace(row, text=cut_to_bytes(row.text, self.last_bytes))
                    if not row.text:
                        return
            yield row
            if taken == self.take:
                return


def num_bytes_of(text: Text) -> int:
    """Return how long the text's UTF-8 is."""
    if isinstance(text, LongText):
        return text.num_bytes
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))


def cut_to_bytes(text: Text, limit: int) -> Text:
    """Return the longest beginning of the text whose UTF-8 is at most `limit` bytes."""
    if isinstance(text, LongText):
        return text.first_bytes(limit)
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")


@dataclass
class Skipped:
    """Rows left out, counted by reason, the first of each named."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[RowLocation]] = field(default_factory=dict)
    bad: int = 0
    """How many of them were bad rows; the others a source left out by its own rule."""
    first_bad: BadRow | None = None
    """The first of those."""
    unread_bytes: int = 0
    """About how much text was lost with those that stand for something damaged."""
    cut_documents: int = 0
    """Documents that were not left out but cut where validation begins: each split has counted one.
    """

    def add(self, reason: str, places: Sequence[RowLocation], count: int = 1) -> None:
        """Count rows, the first of which are at these places."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        named = self.first.setdefault(reason, [])
        named.extend(places[: FIRST_NAMED - len(named)])

    def entries(self) -> tuple[SkippedEntry, ...]:
        """Return them as a manifest names them, by lines, for which files are read again; names
        that are not UTF-8 as near as can be.
        """
        return tuple(
            SkippedEntry(
                reason=reason,
                count=count,
                first=tuple(storable(place.where()) for place in self.first[reason]),
            )
            for reason, count in self.counts.items()
        )


def storable(name: str) -> str:
    """Return a file's name as text, also where its bytes are not UTF-8; of an address, without its
    secrets.
    """
    return without_secrets(
        name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    )


class Sink(Protocol):
    """Where packed tokens go."""

    def append(
        self,
        split: SplitName,
        tokens: Array,
        ends: Array,
        *,
        text_bytes: int,
        mask: Array | None = None,
        marks: Array | None = None,
    ) -> None:
        """Append tokens; `ends` are the positions in `tokens` after each document's last token;
        `mask` is 0 where one is no target.

        A document may go on in the next call.

        Shapes:  tokens (T,); ends (documents,); mask (T,); marks (documents,) of MARK.
        """


@dataclass(frozen=True)
class Tally:
    """What was done since the last one."""

    num_bytes: int
    """About how much was read."""
    documents: int
    tokens: int


Tell = Callable[[Tally], object]


@dataclass(frozen=True)
class Packing:
    """How documents become tokens; a worker is told it once."""

    tokenizer: Tokenizer
    assignment: Assignment
    """The split rule, for jobs that state none of their own."""
    on_bad_row: OnBadRow
    mask_field: str | None = None
    """Where a row's prompt was; with one, prompts are packed before the text, and a mask says that
    they are no targets.
    """
    duplicates: Duplicates = "keep"
    """What becomes of a document that was there before; to drop it, documents are marked here and
    found when all are packed.
    """


def pack(jobs: Iterable[Job], packing: Packing, sink: Sink, tell: Tell = lambda _: None) -> Skipped:
    """Tokenise some jobs into the sink, and return what was left out.

    Raises: DataError for the first row that cannot be used, unless such rows are to be skipped.
    """
    packers = {name: _Packer(name, packing, sink) for name in SPLITS}
    skipped = Skipped()
    told = (0, 0)
    for job in jobs:
        for num_bytes in _pack_job(job, packing, packers, skipped):
            done = (
                sum(packer.documents for packer in packers.values()) - skipped.cut_documents,
                sum(packer.tokens for packer in packers.values()),
            )
            tell(Tally(num_bytes, done[0] - told[0], done[1] - told[1]))
            told = done
    for packer in packers.values():
        packer.flush()
    return skipped


def _pack_job(
    job: Job, packing: Packing, packers: dict[SplitName, _Packer], skipped: Skipped
) -> Iterator[int]:
    """Pack a job, and yield about how much of it was read, whenever it was much, and at its end."""
    left = job.part.num_bytes
    ordinal = job.first - 1
    assignment = job.assignment or packing.assignment
    for row in job.rows():
        if isinstance(row, LeftOut):
            skipped.add(row.reason, [row.location], row.count)
        elif isinstance(row, BadRow):
            skip_or_raise(row, skipped, packing.on_bad_row)
        else:
            ordinal += 1
            try:
                made = [
                    (name, text, _tokenised(text, packing))
                    for name, text in assignment.pieces(row.text, ordinal)
                ]
                prompt = (
                    _tokenised(row.prompt, packing) if row.prompt and packing.mask_field else ()
                )
                for name, text, pieces in made:
                    packer = packers[name]
                    if prompt:
                        packer.begin(prompt)
                    for done, ids in enumerate(pieces, 1):
                        packer.go_on(ids)
                        if done % PIECES_TOLD == 0:
                            read = min(PIECES_TOLD * PIECE_CHARACTERS, left)
                            left -= read
                            yield read
                    packer.end(row.prompt if prompt else "", text)
                    prompt = ()
                skipped.cut_documents += len(made) - 1
            except NotEncodable as error:
                what = f"cannot be tokenised: {error.what.removesuffix('.')}"
                skip_or_raise(
                    BadRow(what, error.fix, "cannot be tokenised", row.name, row.offset),
                    skipped,
                    packing.on_bad_row,
                )
    yield left


def _tokenised(text: Text, packing: Packing) -> Iterable[Array]:
    """Return the ids of a text, piece by piece; those of a long one are made as they are asked for.

    Raises: NotEncodable when it cannot be tokenised; for a long one only where that would be
            skipped: it is all or nothing.
    """
    if isinstance(text, str) and len(text) <= HELD_CHARACTERS:
        return list(packing.tokenizer.encode_stream(chunks_of(text)))
    if packing.on_bad_row == "skip":
        for _ in packing.tokenizer.encode_stream(chunks_of(text)):
            pass
    return packing.tokenizer.encode_stream(chunks_of(text))


def skip_or_raise(row: BadRow, skipped: Skipped, on_bad_row: OnBadRow) -> None:
    """Count a bad row, or raise its error."""
    if on_bad_row == "raise":
        raise row.error
    skipped.bad += 1
    skipped.first_bad = skipped.first_bad or row
    skipped.unread_bytes += row.unread_bytes
    skipped.add(row.reason, [row.location])


class _Packer:
    """Gathers the documents of one split, one after the other, and hands them to the sink before
    they take much memory.
    """

    def __init__(self, split: SplitName, packing: Packing, sink: Sink) -> None:
        self._split = split
        self._sink = sink
        self._end_of_text = np.array([packing.tokenizer.eot_id], np.uint32)
        self._masked = packing.mask_field is not None
        self._marked = packing.duplicates == "drop"
        self._clear()
        self.documents = self._flushed_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._flushed_tokens + self._held_tokens

    def _clear(self) -> None:
        self._held: list[Array] = []
        self._held_tokens = self._text_bytes = 0
        self._ends: list[int] = []
        self._prompts: list[tuple[int, int]] = []
        """Where among the tokens prompts begin and end."""
        self._marks: list[bytes] = []

    def begin(self, prompt: Iterable[Array]) -> None:
        """Begin a document with the tokens of its prompt."""
        for ids in prompt:
            start = self._held_tokens
            self._prompts.append((start, start + len(ids)))
            self.go_on(ids)

    def go_on(self, ids: Array) -> None:
        """Append tokens of its text."""
        self._held.append(ids)
        self._held_tokens += len(ids)
        if self._held_tokens >= HELD_TOKENS:
            self.flush()

    def end(self, prompt: str, text: Text) -> None:
        """End the document that has this prompt, nothing for none, and this text."""
        self._held.append(self._end_of_text)
        self._held_tokens += 1
        self._ends.append(self._held_tokens)
        num_bytes = num_bytes_of(text)
        self._text_bytes += num_bytes
        if self._marked:
            asked = prompt.encode()
            mark = hashlib.sha256(len(asked).to_bytes(8, "little") + asked)
            for chunk in chunks_of(text):
                mark.update(chunk.encode())
            self._marks.append(mark.digest()[:16] + num_bytes.to_bytes(8, "little"))
        self.documents += 1
        if self._held_tokens >= HELD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the sink."""
        if self._held:
            mask = np.ones(self._held_tokens, np.uint8) if self._masked else None
            if mask is not None:
                for start, end in self._prompts:
                    mask[start:end] = 0
            ends = np.array(self._ends, np.int64)
            marks = np.frombuffer(b"".join(self._marks), MARK) if self._marked else None
            self._flushed_tokens += self._held_tokens
            self._sink.append(
                self._split,
                np.concatenate(self._held),
                ends,
                text_bytes=self._text_bytes,
                mask=mask,
                marks=marks,
            )
        self._clear()
