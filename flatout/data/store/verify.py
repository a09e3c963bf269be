"""Reads a whole dataset, in a directory or at a URL, and lists its problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from flatout.data.store.integrity import (
    MASK_VALUES,
    Array,
    Problem,
    ValueCheck,
    document_end_check,
    end_problems,
    file_problems,
    local_blocks,
    manifest_problems,
    token_check,
)
from flatout.data.store.manifest import TOKENIZER, FileEntry, Manifest, SplitName, read_manifest
from flatout.data.store.remote import remote_manifest
from flatout.data.tokenizers import parse_tokenizer
from flatout.errors import DataError, FlatoutError
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded
from flatout.storage.remote.connection import Unreachable
from flatout.storage.remote.parallel import Advance, transfer_all
from flatout.storage.remote.reading import checked_blocks, read_remote

BlocksOf = Callable[[FileEntry], Iterator[tuple[Array, str | None]]]
"""Yields each block of a file with its problem, or with None."""


@dataclass(frozen=True)
class Verified:
    """How much of a dataset was read, and the problems found."""

    problems: tuple[str, ...]
    """One sentence each, with the file and, where known, the byte."""
    files: int
    """Files named by the manifest."""
    blocks: int
    """Blocks read."""
    num_bytes: int
    """Bytes read."""


def verify_dataset(folder: Path, *, progress: Progress = SILENT) -> Verified:
    """Check every file of a dataset directory: sizes, checksums, values, document ends, tokenizer.

    Memory: one block per file in progress, and the document ends.
    Raises: DataError when the directory has no readable manifest.
    """
    folder = expanded(folder)
    manifest = read_manifest(folder)
    problems = list(file_problems(folder, manifest))
    path = folder / TOKENIZER
    if all(problem.name != path.name for problem in problems):
        problems += _tokenizer_problems(path.read_bytes(), str(path), manifest)
    return _verify(
        str(folder),
        manifest,
        problems,
        lambda entry: local_blocks(folder / entry.name, entry),
        progress,
    )


def verify_remote(url: str, *, progress: Progress = SILENT) -> Verified:
    """Check a dataset at a URL as `verify_dataset` checks a directory, without storing it.

    Memory: one block per file in progress, and the document ends.
    Raises: DataError when there is no readable manifest, or the store does not answer.
    """
    _, manifest = remote_manifest(url)
    problems = [*manifest_problems(url, manifest), *_remote_tokenizer_problems(url, manifest)]
    return _verify(
        url,
        manifest,
        problems,
        lambda entry: checked_blocks(f"{url}/{entry.name}", entry),
        progress,
    )


def _verify(
    origin: str, manifest: Manifest, found: list[Problem], blocks_of: BlocksOf, progress: Progress
) -> Verified:
    """Check the blocks of every file that has no problem yet, several files at once."""
    damaged = {problem.name for problem in found}
    sizes: list[int] = []

    def verify_file(
        problems: list[str],
        entry: FileEntry,
        check: ValueCheck,
        split: SplitName | None,
        advance: Advance,
    ) -> None:
        ends: list[Array] = []
        start = 0
        for block, problem in blocks_of(entry):
            if len(block):
                problem = problem or check.problem(block, f"{origin}/{entry.name}", start)
                sizes.append(len(block))
            start += len(block)
            problems += [problem] if problem else []
            ends += [block] if split else []
            advance(len(block))
        if split and not problems and split not in damaged:
            values = np.frombuffer(b"".join(block.data for block in ends), "<i8")
            problems += end_problems(origin, split, values, manifest.splits[split].tokens)

    files = [
        (entry, check, name)
        for split_name, split in manifest.splits.items()
        for entries, check, name in (
            (split.shards, token_check(manifest), None),
            (split.masks, MASK_VALUES, None),
            ((split.document_ends,), document_end_check(split), split_name),
        )
        for entry in entries
        if entry.name not in damaged
    ]
    problems: list[list[str]] = [[] for _ in files]
    jobs = [partial(verify_file, own, *file) for own, file in zip(problems, files, strict=True)]
    num_bytes = sum(entry.size_bytes for entry, _, _ in files)
    transfer_all(f"Reading {origin}", jobs, num_bytes, progress)
    return Verified(
        (*(problem.what for problem in found), *chain.from_iterable(problems)),
        len(manifest.files),
        len(sizes),
        sum(sizes),
    )


def _remote_tokenizer_problems(url: str, manifest: Manifest) -> list[Problem]:
    where = f"{url}/{TOKENIZER}"
    try:
        contents = [read_remote(f"{url}/{entry.name}") for entry in manifest.tokenizer.files]
    except Unreachable:
        raise
    except DataError as error:
        return [Problem(TOKENIZER, error.what)]
    if hashlib.sha256(b"".join(contents)).hexdigest() != manifest.tokenizer.digest:
        return [Problem(TOKENIZER, f"{where} is not the tokenizer that made these tokens.")]
    return list(_tokenizer_problems(contents[0], where, manifest))


def _tokenizer_problems(content: bytes, where: str, manifest: Manifest) -> Iterator[Problem]:
    try:
        tokenizer = parse_tokenizer(content, where)
    except FlatoutError as error:
        yield Problem(TOKENIZER, error.what)
        return
    if tokenizer.vocab_size != manifest.vocab_size:
        yield Problem(
            TOKENIZER,
            f"{where} has {tokenizer.vocab_size:,} tokens. "
            f"The manifest lists {manifest.vocab_size:,}.",
        )
