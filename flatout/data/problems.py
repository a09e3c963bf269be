"""What is wrong with a data set folder, as far as it can be told without reading its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.data.manifest import BLOCK_BYTES, Manifest, SplitEntry

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
    for name, split in manifest.splits.items():
        yield from _size_problems(folder, name, split, np.dtype(manifest.dtype).itemsize)
    path = folder / manifest.tokenizer.file
    try:
        same = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == manifest.tokenizer.digest
    except OSError as error:
        yield Problem(path.name, f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.")
    else:
        if not same:
            yield Problem(path.name, f"{path} is not the tokenizer that made these tokens.")


def _size_problems(folder: Path, name: str, split: SplitEntry, itemsize: int) -> Iterator[Problem]:
    for entry in (*split.shards, *split.masks, split.document_ends):
        path = folder / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size_bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            yield Problem(entry.name, f"{path} {found}; the manifest says {entry.size_bytes} bytes.")
        if len(entry.block_crc32) != -(-entry.size_bytes // BLOCK_BYTES):
            yield Problem(entry.name, f"{folder}: the manifest does not have one checksum a block for {entry.name}.")
    sizes = {
        "tokens": (sum(entry.size_bytes for entry in split.shards), split.tokens * itemsize),
        "documents": (split.document_ends.size_bytes, split.documents * 8),
        "mask values": (sum(entry.size_bytes for entry in split.masks), split.tokens if split.masks else 0),
    }
    for what, (found_bytes, wanted_bytes) in sizes.items():
        if found_bytes != wanted_bytes:
            yield Problem(name, f"{folder}: the files of {name} hold {found_bytes} bytes of {what}, not {wanted_bytes}.")
