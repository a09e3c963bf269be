"""Checks a dataset: file sizes, the manifest, and the values in each block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.data.store.manifest import BLOCK_BYTES, FileEntry, Manifest, SplitName
from flatout.storage.files import Array as Array
from flatout.storage.whole import problem_of

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
            if entry.name not in found and problem_of(path, entry):
                yield Problem(entry.name, f"{path} is not the tokenizer that made these tokens.")
        except OSError as error:
            what = f"{path} cannot be read: {error.strerror or error}."
            yield Problem(entry.name, what, "Check its permissions.")


def _size_problem(path: Path, entry: FileEntry) -> str | None:
    size = path.stat().st_size if path.is_file() else None
    if size == entry.size_bytes:
        return None
    found = "is missing" if size is None else f"has {size} bytes"
    return f"{path} {found}. The manifest lists {entry.size_bytes} bytes."


def manifest_problems(path: Path, manifest: Manifest) -> Iterator[Problem]:
    """Yield contradictions between the sizes, counts and checksums in a dataset's manifest."""
    itemsize = np.dtype(manifest.dtype).itemsize
    names = [entry.name for entry in manifest.files]
    for name in {name for name in names if names.count(name) > 1}:
        yield Problem(name, f"{path}: the manifest lists {name} twice.")
    for shard in manifest.shards:
        tokens = sum(counts.tokens for counts in shard.splits.values())
        documents = sum(counts.documents for counts in shard.splits.values())
        expected = [(shard.tokens, tokens * itemsize), (shard.ends, documents * 8)]
        if shard.mask is not None or manifest.is_masked:
            expected.append((shard.mask or shard.tokens, tokens if shard.mask else -1))
        for entry, size in expected:
            if size != entry.size_bytes:
                what = f"{tokens} tokens and {documents} documents do not fit into {entry.name}"
                yield Problem(entry.name, f"{path}: {what}, of {entry.size_bytes} bytes.")
            if len(entry.block_crc32) != -(-entry.size_bytes // BLOCK_BYTES):
                what = f"the manifest does not have one checksum per block for {entry.name}"
                yield Problem(entry.name, f"{path}: {what}.")


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
    """The allowed range of the values in a file: tokens or mask values."""

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


def read_ends(folder: Path, manifest: Manifest, split: SplitName) -> tuple[Array, list[str]]:
    """Return the end of each document in a split's tokens, and the problems with these ends.

    They must ascend to the number of tokens.

    Shapes:  returns (documents,), int64.
    """
    found: list[Array] = []
    problems: list[str] = []
    before = 0
    for shard in manifest.shards:
        blocks = list(local_blocks(folder / shard.ends.name, shard.ends))
        problems += [problem for _, problem in blocks if problem]
        first, counts = shard.start(split).documents, shard.splits[split]
        ends = np.frombuffer(b"".join(block.data for block, _ in blocks), "<i8")
        found.append(ends[first : first + counts.documents] + before)
        before += counts.tokens
    ends = np.concatenate([np.empty(0, np.int64), *found])
    wrong = np.flatnonzero(np.diff(ends, prepend=0) <= 0)
    last = int(ends[-1]) if len(ends) else 0
    if not problems and len(wrong):
        number = int(wrong[0])
        end = int(ends[number])
        problems.append(
            f"{folder}: document {number} of {split} ends at {end}, not after the previous one."
        )
    elif not problems and before != last:
        problems.append(
            f"{folder}: the documents of {split} end at {last}, but it has {before} tokens."
        )
    return ends, problems
