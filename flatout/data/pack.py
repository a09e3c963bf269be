"""Documents to packed tokens: which go to which split, each followed by end-of-text, no padding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from flatout.data.manifest import SPLITS, SkippedEntry, SplitName
from flatout.data.tokenizer import Tokenizer
from flatout.errors import DataError, without_secrets
from flatout.sources import FIRST_NAMED, BadRow, Document, LeftOut, Part, Row

Array = np.ndarray[Any, np.dtype[Any]]
OnBadRow = Literal["raise", "skip"]
Duplicates = Literal["keep", "drop"]

MARK = np.dtype([("hash", "<u8", 2), ("text_bytes", "<i8")])
"""What tells a document from others: half the SHA-256 of its prompt and text; and the bytes of its text."""

HELD_TOKENS = 1 << 20
"""So many tokens of a split are held at most before they are written, whatever there is to pack."""


@dataclass(frozen=True)
class ByHash:
    """`hash F`: a document is validation when the first 8 bytes of its text's SHA-256, as a fraction of 2^64, are below F.

    It depends on the text alone: equal documents share a split, and a document keeps its split when others come or go.
    """

    fraction: float

    def pieces(self, text: str, ordinal: int) -> Iterator[tuple[SplitName, str]]:
        """Yield the document whole, with its split."""
        yield ("val" if hash_fraction(text) < self.fraction else "train"), text


@dataclass(frozen=True)
class ByPlace:
    """`tail F`: validation begins in document number `document`, at its character `character`; each side of a cut is a document."""

    document: int
    character: int

    def pieces(self, text: str, ordinal: int) -> Iterator[tuple[SplitName, str]]:
        """Yield the document whole, or the two sides of the one that is cut, each with its split."""
        if ordinal == self.document and self.character:
            yield "train", text[: self.character]
            yield "val", text[self.character :]
        else:
            yield ("train" if ordinal < self.document else "val"), text


Assignment = ByHash | ByPlace


def hash_fraction(text: str) -> float:
    """Return where the text's hash falls in [0, 1)."""
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Job:
    """What one process is to pack: a part, or the beginning of it."""

    part: Part
    first: int = 0
    """Number of the part's first document in the corpus; only `tail` asks for it."""
    take: int | None = None
    """Documents to take; None takes all."""
    last_bytes: int | None = None
    """UTF-8 bytes to keep of the last document taken; None keeps it whole."""

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


def cut_to_bytes(text: str, limit: int) -> str:
    """Return the longest beginning of the text whose UTF-8 is at most `limit` bytes."""
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")


@dataclass
class Skipped:
    """Rows left out, counted by reason, the first of each named."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    bad: int = 0
    """How many of them were bad rows; the others a source left out by its own rule."""
    first_bad: str = ""
    """What is wrong with the first bad row."""

    def add(self, reason: str, names: Sequence[str], count: int = 1) -> None:
        """Count rows, the first of which are named."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        named = self.first.setdefault(reason, [])
        named.extend(names[: FIRST_NAMED - len(named)])

    def entries(self) -> tuple[SkippedEntry, ...]:
        """Return them as they are stored; names that are not UTF-8 as near as can be."""
        return tuple(
            SkippedEntry(reason=reason, count=count, first=tuple(map(_storable, self.first[reason]))) for reason, count in self.counts.items()
        )


def _storable(name: str) -> str:
    """Return a file's name as text, also where its bytes are not UTF-8; of an address, without its secrets."""
    return without_secrets(name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace"))


class Sink(Protocol):
    """Where packed tokens go."""

    def append(self, split: SplitName, tokens: Array, ends: Array, *, text_bytes: int, mask: Array | None = None, marks: Array | None = None) -> None:
        """Append tokens; `ends` are the positions in `tokens` after each document's last token; `mask` is 0 where one is no target.

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
    on_bad_row: OnBadRow
    mask_field: str | None = None
    """Where a row's prompt was; with one, prompts are packed before the text, and a mask says that they are no targets."""
    duplicates: Duplicates = "keep"
    """What becomes of a document that was there before; to drop it, documents are marked here and found when all are packed."""


def pack(jobs: Iterable[Job], packing: Packing, sink: Sink, tell: Tell = lambda _: None) -> Skipped:
    """Tokenise some jobs into the sink, and return what was left out.

    Raises: DataError for the first row that cannot be used, unless such rows are to be skipped.
    """
    packers = {name: _Packer(name, packing, sink) for name in SPLITS}
    skipped = Skipped()
    told = (0, 0)
    for job in jobs:
        _pack_job(job, packing, packers, skipped)
        done = (sum(packer.documents for packer in packers.values()), sum(packer.tokens for packer in packers.values()))
        tell(Tally(job.part.num_bytes, done[0] - told[0], done[1] - told[1]))
        told = done
    for packer in packers.values():
        packer.flush()
    return skipped


def _pack_job(job: Job, packing: Packing, packers: dict[SplitName, _Packer], skipped: Skipped) -> None:
    ordinal = job.first - 1
    for row in job.rows():
        if isinstance(row, LeftOut):
            skipped.add(row.reason, [row.name])
        elif isinstance(row, BadRow):
            skip_or_raise(row, skipped, packing.on_bad_row)
        else:
            ordinal += 1
            try:
                made = [(name, text, list(packing.tokenizer.encode_pieces(text))) for name, text in packing.assignment.pieces(row.text, ordinal)]
                prompt = list(packing.tokenizer.encode_pieces(row.prompt)) if row.prompt and packing.mask_field else []
            except DataError as error:
                named = DataError(f"{row.where()}: {error.what}", fix=error.fix)
                skip_or_raise(BadRow(named, "cannot be tokenised", row.where()), skipped, packing.on_bad_row)
                continue
            for name, text, pieces in made:
                packers[name].add(prompt, text, pieces, about=row.prompt if prompt else "")
                prompt = []


def skip_or_raise(row: BadRow, skipped: Skipped, on_bad_row: OnBadRow) -> None:
    """Count a bad row, or raise its error."""
    if on_bad_row == "raise":
        raise row.error
    skipped.bad += 1
    skipped.first_bad = skipped.first_bad or _storable(row.error.what)
    skipped.add(row.reason, [row.name])


class _Packer:
    """Gathers the documents of one split, and hands them to the sink before they take much memory."""

    def __init__(self, split: SplitName, packing: Packing, sink: Sink) -> None:
        self._split = split
        self._sink = sink
        self._end_of_text = np.array([packing.tokenizer.eot_id], np.uint32)
        self._masked = packing.mask_field is not None
        self._marked = packing.duplicates == "drop"
        self._clear()
        self.documents = self.tokens = 0

    def _clear(self) -> None:
        self._held: list[Array] = []
        self._lengths: list[tuple[int, int]] = []
        """Of each document, tokens of its prompt and of the rest."""
        self._marks: list[bytes] = []
        self._held_tokens = self._text_bytes = 0

    def add(self, prompt: list[Array], text: str, pieces: list[Array], *, about: str) -> None:
        """Append a document, its prompt, whose text is `about`, before it and end-of-text after it."""
        before, after = sum(map(len, prompt)), sum(map(len, pieces)) + 1
        self._held += [*prompt, *pieces, self._end_of_text]
        self._lengths.append((before, after))
        self._held_tokens += before + after
        data = text.encode()
        self._text_bytes += len(data)
        if self._marked:
            self._marks.append(hashlib.sha256(about.encode() + b"\0" + data).digest()[:16] + len(data).to_bytes(8, "little"))
        self.documents += 1
        self.tokens += before + after
        if self._held_tokens >= HELD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the sink."""
        if self._held:
            lengths = np.array(self._lengths, np.int64)
            mask = np.repeat(np.tile(np.array([0, 1], np.uint8), len(lengths)), lengths.ravel()) if self._masked else None
            ends = np.cumsum(lengths.sum(axis=1))
            marks = np.frombuffer(b"".join(self._marks), MARK) if self._marked else None
            self._sink.append(self._split, np.concatenate(self._held), ends, text_bytes=self._text_bytes, mask=mask, marks=marks)
        self._clear()
