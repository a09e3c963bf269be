"""Reads a whole data set, in a folder or at an address, and lists what is wrong with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from flatout.data.store.integrity import (
    MASKS,
    Items,
    end_problems,
    ends_of,
    file_problems,
    manifest_problems,
    tokens_of,
)
from flatout.data.store.manifest import FileEntry, Manifest, SplitName, read_manifest
from flatout.data.store.remote import remote_manifest, remote_tokenizer
from flatout.data.store.shards import Split
from flatout.data.tokenizers import load_tokenizer
from flatout.errors import DataError, FlatoutError
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.transfer.connection import Unreachable
from flatout.transfer.parallel import Transfers
from flatout.transfer.reading import checked_blocks


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
    """Check every file, block and count of a data set folder: sizes, checksums, token ids, mask
    values, document ends, the tokenizer.

    Memory: one block, and the document ends.
    Raises: DataError when the folder has no manifest that can be read.
    """
    folder = expanded(folder)
    manifest = read_manifest(folder)
    unsized = list(file_problems(folder, manifest))
    problems = [problem.what for problem in unsized]
    damaged = {problem.name for problem in unsized}
    if manifest.tokenizer.file not in damaged:
        problems += _tokenizer_problems(folder / manifest.tokenizer.file, manifest)
    entries = manifest.files
    sizes = []
    with progress.task(
        f"Reading {folder}",
        total=sum(entry.size_bytes for entry in entries if entry.name not in damaged) / 1e6,
        unit="MB",
    ) as task:
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
    """Check what is at an address, as it comes, for all that `verify_dataset` checks a folder for.
    Nothing is kept.

    Memory: a block of each file under way, and the document ends.
    Raises: DataError when there is no manifest that can be read, or the store does not answer.
    """
    _, manifest = remote_manifest(address)
    contradictions = list(manifest_problems(address, manifest))
    problems = [problem.what for problem in contradictions]
    damaged = {problem.name for problem in contradictions}
    sizes: list[int] = []

    def check(entry: FileEntry, items: Items, split: SplitName | None = None) -> None:
        if entry.name in damaged:
            return
        blocks: list[bytes] = []
        start, whole = 0, True
        for block, problem in checked_blocks(f"{address}/{entry.name}", entry):
            if block and problem is None:
                problem = items.problem(
                    np.frombuffer(block, np.uint8), f"{address}/{entry.name}", start
                )
            start += len(block)
            problems.extend([problem] if problem else [])
            sizes.extend([len(block)] if block else [])
            whole = whole and problem is None
            blocks += [block] if split else []
            transfers.advance(len(block))
        if split and whole and split not in damaged:
            problems.extend(
                end_problems(
                    address,
                    split,
                    np.frombuffer(b"".join(blocks), "<i8"),
                    manifest.splits[split].tokens,
                )
            )

    wanted = [
        partial(check, entry, tokens_of(manifest))
        for split in manifest.splits.values()
        for entry in split.shards
    ]
    wanted += [
        partial(check, entry, MASKS) for split in manifest.splits.values() for entry in split.masks
    ]
    wanted += [
        partial(check, split.document_ends, ends_of(split), name)
        for name, split in manifest.splits.items()
    ]
    with progress.task(
        f"Reading {address}",
        total=sum(entry.size_bytes for entry in manifest.files) / 1e6,
        unit="MB",
    ) as task:
        transfers = Transfers(task)
        transfers.run(wanted)
    problems += _stored_tokenizer_problems(address, manifest)
    return Verified(tuple(sorted(problems)), len(manifest.files) + 1, len(sizes), sum(sizes))


def _stored_tokenizer_problems(address: str, manifest: Manifest) -> list[str]:
    try:
        data = remote_tokenizer(address, manifest)
    except Unreachable:
        raise
    except DataError as error:
        return [error.what]
    with tempfile.TemporaryDirectory(prefix="flatout-verify-") as folder:
        path = Path(folder) / manifest.tokenizer.file
        path.write_bytes(data)
        return [problem.replace(folder, address) for problem in _tokenizer_problems(path, manifest)]


def _tokenizer_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(path)
    except FlatoutError as error:
        yield error.what
        return
    if tokenizer.vocab_size != manifest.vocab_size:
        yield f"{path} has {tokenizer.vocab_size:,} tokens; the manifest says {manifest.vocab_size:,}."


def _end_problems(folder: Path, split: Split) -> Iterator[str]:
    try:
        ends = split.document_ends
    except DataError:  # the block it names is among the problems
        return
    yield from end_problems(folder, split.name, ends, split.num_tokens)
