"""Documents to packed tokens: which go to which split, each followed by end-of-text, no padding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flatout.data.manifest import SPLITS, SplitName, token_dtype
from flatout.data.tokenizer import Tokenizer
from flatout.errors import DataError
from flatout.sources import FIRST_NAMED, BadRow, Document, LeftOut, Part, Row

Array = np.ndarray[Any, np.dtype[Any]]
OnBadRow = Literal["raise", "skip"]


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
                    row = Document(cut_to_bytes(row.text, self.last_bytes), row.name, row.offset)
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

    def add(self, reason: str, name: str) -> None:
        """Count one row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.first.setdefault(reason, [])
        if len(named) < FIRST_NAMED:
            named.append(name)

    def extend(self, later: Skipped) -> None:
        """Add the rows of a later part."""
        for reason, count in later.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            named = self.first.setdefault(reason, [])
            named.extend(later.first[reason][: FIRST_NAMED - len(named)])


@dataclass
class PackedSplit:
    """Tokens of one split of one part, end-of-text after each document."""

    tokens: Array
    ends: Array
    text_bytes: int


@dataclass
class Packed:
    """One part, packed."""

    splits: dict[SplitName, PackedSplit]
    documents: int
    num_bytes: int
    skipped: Skipped


def pack(job: Job, tokenizer: Tokenizer, assignment: Assignment, on_bad_row: OnBadRow) -> Packed:
    """Tokenise one part.

    Raises: DataError for the first row that cannot be used, unless such rows are to be skipped.
    """
    packers = {name: _Packer(tokenizer) for name in SPLITS}
    skipped = Skipped()
    documents = 0
    ordinal = job.first - 1
    for row in job.rows():
        if isinstance(row, LeftOut):
            skipped.add(row.reason, row.name)
        elif isinstance(row, BadRow):
            skip_or_raise(row, skipped, on_bad_row)
        else:
            ordinal += 1
            try:
                made = [(name, text, encode(text, tokenizer)) for name, text in assignment.pieces(row.text, ordinal)]
            except DataError as error:
                named = DataError(f"{row.where()}: {error.what}", fix=error.fix)
                skip_or_raise(BadRow(named, "cannot be tokenised", row.where()), skipped, on_bad_row)
                continue
            documents += 1
            for name, text, pieces in made:
                packers[name].add(text, pieces)
    return Packed({name: packer.packed() for name, packer in packers.items()}, documents, job.part.num_bytes, skipped)


def encode(text: str, tokenizer: Tokenizer) -> list[Array]:
    """Return the ids of a document with end-of-text, in pieces, as they are stored."""
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    return [*(ids.astype(dtype) for ids in tokenizer.encode_pieces(text)), np.array([tokenizer.eot_id], dtype)]


def skip_or_raise(row: BadRow, skipped: Skipped, on_bad_row: OnBadRow) -> None:
    """Count a bad row, or raise its error."""
    if on_bad_row == "raise":
        raise row.error
    skipped.add(row.reason, row.name)


class _Packer:
    """Gathers the documents of one split."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size))
        self._pieces: list[Array] = []
        self._lengths: list[int] = []
        self._text_bytes = 0

    def add(self, text: str, pieces: list[Array]) -> None:
        """Append a document, which ends with end-of-text."""
        self._pieces += pieces
        self._lengths.append(sum(map(len, pieces)))
        self._text_bytes += len(text.encode())

    def packed(self) -> PackedSplit:
        """Return everything in one array."""
        tokens = np.concatenate(self._pieces) if self._pieces else np.zeros(0, self._dtype)
        return PackedSplit(tokens, np.cumsum(self._lengths, dtype=np.int64), self._text_bytes)
