"""Assign each document, or each side of a cut document, to a split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.data.store.manifest import SplitName
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
