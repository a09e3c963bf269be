"""Jobs and ranges, which divide the documents of a corpus among processes and splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flatout.data.store.manifest import SplitName
from flatout.sources import Document, ReadTask, Row
from flatout.sources.long import LongText, Text


@dataclass(frozen=True)
class ByHash:
    """`hash F`: a document is validation text if its SHA-256 is in the lowest fraction F.

    The first 8 bytes, as a fraction of 2^64, are compared with F. Equal documents share a split,
    and a document keeps its split when others are added or removed.
    """

    fraction: float

    def assign(self, text: Text, index: int) -> Iterator[tuple[SplitName, Text]]:
        """Yield the whole document with its split."""
        yield ("val" if hash_fraction(text) < self.fraction else "train"), text


@dataclass(frozen=True)
class ByPosition:
    """`tail F`: validation starts at a character of a document; each side becomes a document."""

    document: int
    character: int

    def assign(self, text: Text, index: int) -> Iterator[tuple[SplitName, Text]]:
        """Yield the whole document, or both sides of the one that is cut, with their splits."""
        if index == self.document and self.character:
            yield "train", text[: self.character]
            yield "val", text[self.character :]
        else:
            yield ("train" if index < self.document else "val"), text


@dataclass(frozen=True)
class Whole:
    """`named`: all documents go to one split."""

    split: SplitName

    def assign(self, text: Text, index: int) -> Iterator[tuple[SplitName, Text]]:
        """Yield the whole document with the split."""
        yield self.split, text


Assignment = ByHash | ByPosition | Whole


def sha256_of(text: Text) -> bytes:
    """Return the SHA-256 of the text's UTF-8."""
    if isinstance(text, LongText):
        return text.sha256
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()


def hash_fraction(text: Text) -> float:
    """Return the text's hash as a number in [0, 1)."""
    return int.from_bytes(sha256_of(text)[:8], "big") / 2**64


RANGE_BYTES = 8 << 20
"""Approximate bytes to read per range: small, so that an interruption loses little and many cores
share the work evenly.
"""


@dataclass(frozen=True)
class Job:
    """A read task to pack, or the beginning of one."""

    read_task: ReadTask
    first: int = 0
    """Index in the corpus of its first document; used by `tail` only."""
    take: int | None = None
    """Documents to take; None takes all."""
    last_bytes: int | None = None
    """UTF-8 bytes to keep of the last document taken; None keeps all of it."""
    assignment: Assignment | None = None
    """Split of its documents; None uses the dataset's assignment."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows up to the last document to take."""
        taken = 0
        for row in self.read_task.rows() if self.take is None or self.take > 0 else ():
            if isinstance(row, Document):
                taken += 1
                if taken == self.take and self.last_bytes is not None:
                    row = replace(row, text=cut_to_bytes(row.text, self.last_bytes))
                    if not row.text:
                        return
            yield row
            if taken == self.take:
                return


@dataclass(frozen=True)
class Range:
    """Consecutive jobs that one process packs at a time."""

    number: int
    jobs: tuple[Job, ...]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes to read; 0 when unknown."""
        return sum(job.read_task.num_bytes for job in self.jobs)


def make_ranges(jobs: Sequence[Job]) -> tuple[Range, ...]:
    """Return the jobs in ranges of about `RANGE_BYTES`; a job of unknown size is its own range."""
    groups: list[list[Job]] = []
    room = 0
    for job in jobs:
        size = job.read_task.num_bytes or RANGE_BYTES
        if not groups or size > room:
            groups.append([])
            room = RANGE_BYTES
        groups[-1].append(job)
        room -= size
    return tuple(Range(number, tuple(group)) for number, group in enumerate(groups))


def num_bytes_of(text: Text) -> int:
    """Return the length of the text in UTF-8 bytes."""
    if isinstance(text, LongText):
        return text.num_bytes
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))


def cut_to_bytes(text: Text, limit: int) -> Text:
    """Return the longest prefix of the text that has at most `limit` bytes in UTF-8."""
    if isinstance(text, LongText):
        return text.first_bytes(limit)
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")
