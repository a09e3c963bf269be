"""Checks a dataset: file sizes, the manifest, and the values in each block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.data.store.manifest import BLOCK_BYTES, FileEntry, Manifest, SplitEntry
from flatout.storage.files import Array as Array
from flatout.storage.files import entry_of

PREPARE_AGAIN = "The directory is damaged: delete it and run `flatout prepare` again."


class Problem(NamedTuple):
    """A problem with a file or a split of a dataset."""

    name: str
    """Name of the file or the split."""
    what: str
    """The problem, as a sentence."""
    fix: str = PREPARE_AGAIN


def file_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Yield the problems with a directory's file sizes, manifest and tokenizer."""
    found = set()
    for entry in manifest.files:
        if what := _size_problem(folder / entry.name, entry):
            found.add(entry.name)
            yield Problem(entry.name, what)
    yield from manifest_problems(folder, manifest)
    for entry in manifest.tokenizer.files:
        path = folder / entry.name
        try:
            if entry.name not in found and entry_of(path) != entry:
                yield Problem(entry.name, f"{path} is not the tokenizer that made these tokens.")
        except OSError as error:
            what = f"{path} cannot be read: {error.strerror or error}."
            yield Problem(entry.name, what, "Check its permissions.")


def file_problem(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file's size or with one of its blocks, or None."""
    return _size_problem(path, entry) or next(
        (problem for _, problem in local_blocks(path, entry) if problem), None
    )


def _size_problem(path: Path, entry: FileEntry) -> str | None:
    size = path.stat().st_size if path.is_file() else None
    if size == entry.size_bytes:
        return None
    found = "is missing" if size is None else f"has {size} bytes"
    return f"{path} {found}. The manifest lists {entry.size_bytes} bytes."


def manifest_problems(origin: Path | str, manifest: Manifest) -> Iterator[Problem]:
    """Yield contradictions between the sizes, counts and checksums in a dataset's manifest."""
    itemsize = np.dtype(manifest.dtype).itemsize
    for name, split in manifest.splits.items():
        for entry in (*split.shards, *split.masks, split.document_ends):
            if len(entry.block_crc32) != -(-entry.size_bytes // BLOCK_BYTES):
                what = f"the manifest does not have one checksum per block for {entry.name}"
                yield Problem(entry.name, f"{origin}: {what}.")
        sizes = {
            "tokens": (sum(entry.size_bytes for entry in split.shards), split.tokens * itemsize),
            "documents": (split.document_ends.size_bytes, split.documents * 8),
            "mask values": (
                sum(entry.size_bytes for entry in split.masks),
                split.tokens if split.masks else 0,
            ),
        }
        for what, (found_bytes, expected_bytes) in sizes.items():
            if found_bytes != expected_bytes:
                yield Problem(
                    name,
                    f"{origin}: the files of {name} contain {found_bytes} bytes of {what}, "
                    f"not {expected_bytes}.",
                )


def local_blocks(path: Path, entry: FileEntry) -> Iterator[tuple[Array, str | None]]:
    """Yield each block of a file with its problem, or with None when it matches the entry."""
    return (read_block(path, entry, number) for number in range(len(entry.block_crc32)))


def read_block(path: Path, entry: FileEntry, number: int) -> tuple[Array, str | None]:
    """Return a block of a file with its problem, or with None when it matches the entry.

    Shapes:  returns (bytes,), uint8; empty when the block cannot be read.
    """
    start = number * BLOCK_BYTES
    block = np.empty(min(entry.size_bytes - start, BLOCK_BYTES), np.uint8)
    where = f"{path}, byte {start}: the {len(block)}-byte block at this offset"
    try:
        with path.open("rb") as file:
            file.seek(start)
            if file.readinto(block.data) != len(block):
                return block[:0], f"{where} ends early."
    except OSError as error:
        return block[:0], f"{where} cannot be read: {error.strerror or error}."
    matches = zlib.crc32(block.data) == entry.block_crc32[number]
    return block, None if matches else f"{where} fails its checksum."


@dataclass(frozen=True)
class ValueCheck:
    """The allowed range of the values in a file: tokens, mask values or document ends."""

    dtype: np.dtype[Any]
    limit: int
    """Values are at least 0 and below this."""
    complaint: str
    """Message for a value outside the range. The value replaces the braces."""

    def problem(self, block: Array, path: Path | str, start: int) -> str | None:
        """Return the problem with a file's block that starts at byte `start`, or None.

        Shapes:  block (bytes,), uint8.
        """
        values = block.view(self.dtype.newbyteorder("<"))
        largest = int(values.max())
        if largest < self.limit:
            return None
        offset = start + int(values.argmax()) * values.itemsize
        return f"{path}, byte {offset}: {self.complaint.format(largest)}."


MASK_VALUES = ValueCheck(np.dtype(np.uint8), 2, "the mask contains {}, not 0 or 1")
"""The allowed range of mask values."""


def token_check(manifest: Manifest) -> ValueCheck:
    """Return the allowed range of a dataset's tokens."""
    complaint = f"the token id {{}} is outside the vocabulary of {manifest.vocab_size} ids"
    return ValueCheck(np.dtype(manifest.dtype), manifest.vocab_size, complaint)


def document_end_check(split: SplitEntry) -> ValueCheck:
    """Return the allowed range of a split's document ends."""
    complaint = f"a document ends at {{}}, past the last of {split.tokens} tokens"
    return ValueCheck(np.dtype(np.int64), split.tokens + 1, complaint)


def end_problems(origin: str, name: str, ends: Array, num_tokens: int) -> Iterator[str]:
    """Yield the problems with a split's document ends, which must ascend to the number of tokens.

    Shapes:  ends (documents,), int64, each in range.
    """
    wrong = np.flatnonzero(np.diff(ends, prepend=0) <= 0)
    last = int(ends[-1]) if len(ends) else 0
    if len(wrong):
        number = int(wrong[0])
        yield (
            f"{origin}: document {number} of {name} ends at {int(ends[number])}, "
            "not after the previous one."
        )
    elif num_tokens != last:
        yield f"{origin}: the documents of {name} end at {last}, but it has {num_tokens} tokens."
