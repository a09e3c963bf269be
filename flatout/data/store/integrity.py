"""What is wrong with a dataset: as far as sizes tell, and with the items of one block of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.data.store.manifest import BLOCK_BYTES, Manifest, SplitEntry

Array = np.ndarray[Any, np.dtype[Any]]

PREPARE_AGAIN = "The folder is damaged: delete it and run `flatout prepare` again."


class Problem(NamedTuple):
    """What is wrong with a file of a data set."""

    name: str
    """The file's, or its split's."""
    what: str
    """A sentence."""
    fix: str = PREPARE_AGAIN


def file_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Yield what is wrong with a folder's files as far as their sizes tell, and with its tokenizer."""
    for entry in manifest.files:
        path = folder / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size_bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            yield Problem(
                entry.name, f"{path} {found}; the manifest says {entry.size_bytes} bytes."
            )
    yield from manifest_problems(folder, manifest)
    path = folder / manifest.tokenizer.file
    try:
        same = (
            path.is_file()
            and hashlib.sha256(path.read_bytes()).hexdigest() == manifest.tokenizer.digest
        )
    except OSError as error:
        yield Problem(
            path.name,
            f"{path} cannot be read: {error.strerror or error}.",
            "Check its permissions.",
        )
    else:
        if not same:
            yield Problem(path.name, f"{path} is not the tokenizer that made these tokens.")


def manifest_problems(place: Path | str, manifest: Manifest) -> Iterator[Problem]:
    """Yield where the sizes, counts and checksums in the manifest of a dataset contradict each
    other.
    """
    itemsize = np.dtype(manifest.dtype).itemsize
    for name, split in manifest.splits.items():
        for entry in (*split.shards, *split.masks, split.document_ends):
            if len(entry.block_crc32) != -(-entry.size_bytes // BLOCK_BYTES):
                yield Problem(
                    entry.name,
                    f"{place}: the manifest does not have one checksum a block for {entry.name}.",
                )
        sizes = {
            "tokens": (sum(entry.size_bytes for entry in split.shards), split.tokens * itemsize),
            "documents": (split.document_ends.size_bytes, split.documents * 8),
            "mask values": (
                sum(entry.size_bytes for entry in split.masks),
                split.tokens if split.masks else 0,
            ),
        }
        for what, (found_bytes, wanted_bytes) in sizes.items():
            if found_bytes != wanted_bytes:
                yield Problem(
                    name,
                    f"{place}: the files of {name} hold {found_bytes} bytes of {what}, not {wanted_bytes}.",
                )


@dataclass(frozen=True)
class Items:
    """What the items of a file may be: tokens, mask values or document ends."""

    dtype: np.dtype[Any]
    below: int
    """They are at least 0 and below this."""
    complaint: str
    """What is wrong with one that is not, which stands for the braces."""

    def problem(self, block: Array, place: Path | str, start: int) -> str | None:
        """Return what is wrong with a block of the file `place` that begins at byte `start`; None
        when nothing is.

        Shapes:  block (bytes,), uint8.
        """
        items = block.view(self.dtype.newbyteorder("<"))
        largest = int(items.max())
        if largest < self.below:
            return None
        return f"{place}, byte {start + int(items.argmax()) * items.itemsize}: {self.complaint.format(largest)}."


def tokens_of(manifest: Manifest) -> Items:
    """Return what the tokens of a dataset may be."""
    beyond = (
        f"the token id {{}} is beyond the vocabulary, whose ids are below {manifest.vocab_size}"
    )
    return Items(np.dtype(manifest.dtype), manifest.vocab_size, beyond)


def ends_of(split: SplitEntry) -> Items:
    """Return what the document ends of a split may be."""
    return Items(
        np.dtype(np.int64),
        split.tokens + 1,
        f"a document ends at {{}}, beyond the {split.tokens} tokens",
    )


MASKS = Items(np.dtype(np.uint8), 2, "the mask holds {}, not 0 or 1")
"""What the mask of a split may be."""


def end_problems(place: Path | str, name: str, ends: Array, num_tokens: int) -> Iterator[str]:
    """Yield what is wrong with the document ends of a split, each of which is in range: they
    ascend, and the last is the end of the tokens.

    Shapes:  ends (documents,), int64.
    """
    wrong = np.flatnonzero(np.diff(ends, prepend=0) <= 0)
    if len(wrong):
        number = int(wrong[0])
        yield f"{place}: document {number} of {name} ends at {int(ends[number])}, not after the one before it."
    elif num_tokens != (int(ends[-1]) if len(ends) else 0):
        yield f"{place}: the documents of {name} end at {int(ends[-1]) if len(ends) else 0}, its tokens at {num_tokens}."
