"""Reads a whole data set, in a folder or at an address, and lists what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.disk import expanded
from flatout.data.fetch import stored_blocks, stored_manifest, stored_tokenizer
from flatout.data.manifest import FileEntry, Manifest, read_manifest
from flatout.data.problems import file_problems
from flatout.data.shards import Split
from flatout.data.tokenizer import load_tokenizer
from flatout.data.transfers import Transfers
from flatout.errors import DataError, FlatoutError
from flatout.progress import SILENT, Progress
from flatout.sources.remote import Unreachable


@dataclass(frozen=True)
class Verified:
    """What was read of a folder, and what is wrong with it."""

    problems: tuple[str, ...]
    """A sentence each, with the file and the byte where there is one."""
    files: int
    """Files that the manifest names."""
    blocks: int
    """Blocks that were read."""
    num_bytes: int
    """Their bytes."""


def verify_dataset(folder: Path, *, progress: Progress = SILENT) -> Verified:
    """Check every file, block and count of a data set folder: sizes, checksums, token ids, mask values, document ends, the tokenizer.

    Memory: one block, and the document ends.
    Raises: DataError when the folder has no manifest that can be read.
    """
    folder = expanded(folder)
    manifest = read_manifest(folder)
    unsized = list(file_problems(folder, manifest))
    problems = [problem.what for problem in unsized]
    damaged = {problem.name for problem in unsized}
    if manifest.tokenizer.file not in damaged:
        problems += _tokenizer_problems(folder, manifest)
    entries = manifest.files
    sizes = []
    with progress.task(f"Reading {folder}", total=sum(entry.size_bytes for entry in entries if entry.name not in damaged) / 1e6, unit="MB") as task:
        for name in manifest.splits:
            split = Split(folder, name, manifest)
            for num_bytes, problem in split.block_problems(but=damaged):
                sizes.append(num_bytes)
                problems += [problem] if problem else []
                task.advance(num_bytes / 1e6)
            if not damaged & {name, manifest.splits[name].document_ends.name}:
                problems += _end_problems(folder, split)
    return Verified(tuple(problems), len(entries) + 1, len(sizes), sum(sizes))


def verify_stored(address: str, *, progress: Progress = SILENT) -> Verified:
    """Check what lies at an address as it comes: every file's size, every block's checksum, the tokenizer. Nothing is kept.

    A block with its checksum is the block that was prepared, so that what is in it was checked then.

    Memory: a block of each file under way.
    Raises: DataError when there is no manifest that can be read, or the store does not answer.
    """
    _, manifest = stored_manifest(address)
    problems: list[str] = []
    sizes: list[int] = []

    def check(entry: FileEntry) -> None:
        for block, problem in stored_blocks(address, entry):
            problems.extend([problem] if problem else [])
            sizes.extend([len(block)] if block else [])
            transfers.advance(len(block))

    with progress.task(f"Reading {address}", total=sum(entry.size_bytes for entry in manifest.files) / 1e6, unit="MB") as task:
        transfers = Transfers(task)
        transfers.run([partial(check, entry) for entry in manifest.files])
    try:
        stored_tokenizer(address, manifest)
    except Unreachable:
        raise
    except DataError as error:
        problems.append(error.what)
    return Verified(tuple(sorted(problems)), len(manifest.files) + 1, len(sizes), sum(sizes))


def _tokenizer_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    path = folder / manifest.tokenizer.file
    try:
        tokenizer = load_tokenizer(path)
    except FlatoutError as error:
        yield error.what
        return
    if tokenizer.vocab_size > manifest.vocab_size:
        yield f"{path} has {tokenizer.vocab_size:,} tokens; the manifest says {manifest.vocab_size:,}."


def _end_problems(folder: Path, split: Split) -> Iterator[str]:
    """Document ends must ascend, and the last be the end of the tokens: all else was checked block by block."""
    try:
        ends: np.ndarray[Any, np.dtype[np.int64]] = split.document_ends
    except DataError:  # the block it names is among the problems
        return
    steps = np.diff(ends, prepend=0)
    wrong = np.flatnonzero(steps <= 0)
    if len(wrong):
        number = int(wrong[0])
        yield f"{folder}: document {number} of {split.name} ends at {int(ends[number])}, not after the one before it."
    elif split.num_tokens != (int(ends[-1]) if len(ends) else 0):
        yield f"{folder}: the documents of {split.name} end at {int(ends[-1]) if len(ends) else 0}, its tokens at {split.num_tokens}."
