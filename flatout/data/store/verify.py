"""Reads a whole dataset, and lists its problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from flatout.data.store.integrity import (
    MASK_VALUES,
    Problem,
    ValueCheck,
    file_problems,
    local_blocks,
    read_ends,
    token_check,
)
from flatout.data.store.manifest import SPLITS, TOKENIZER, FileEntry, Manifest, read_manifest
from flatout.data.tokenizers import parse_tokenizer
from flatout.errors import FlatoutError
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded
from flatout.storage.remote.parallel import Advance, transfer_all


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
    found = list(file_problems(folder, manifest))
    path = folder / TOKENIZER
    if all(problem.name != path.name for problem in found):
        found += _tokenizer_problems(path.read_bytes(), str(path), manifest)
    damaged = {problem.name for problem in found}
    sizes: list[int] = []

    def verify_file(entry: FileEntry, check: ValueCheck | None, advance: Advance) -> None:
        start = 0
        path = folder / entry.name
        for block, problem in local_blocks(path, entry):
            if check is not None and len(block):
                problem = problem or check.problem(block, path, start)
            sizes.append(len(block))
            start += len(block)
            by_file[entry.name] += [problem] if problem else []
            advance(len(block))

    jobs = []
    by_file: dict[str, list[str]] = {}
    for shard in manifest.shards:
        checks = (
            (shard.tokens, token_check(manifest)),
            (shard.ends, None),
            (shard.mask, MASK_VALUES),
        )
        for entry, check in checks:
            if entry is not None and entry.name not in damaged:
                by_file[entry.name] = []
                jobs.append(partial(verify_file, entry, check))
    num_bytes = sum(entry.size_bytes for entry in manifest.files if entry.name in by_file)
    transfer_all(f"Reading {folder}", jobs, num_bytes, progress)
    problems = [*(problem.what for problem in found), *chain.from_iterable(by_file.values())]
    if all(
        shard.ends.name in by_file and not by_file[shard.ends.name] for shard in manifest.shards
    ):
        problems += chain.from_iterable(read_ends(folder, manifest, name)[1] for name in SPLITS)
    return Verified(tuple(problems), len(manifest.files), len(sizes), sum(sizes))


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
