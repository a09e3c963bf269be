"""Megatron's indexed datasets: NAME.bin with NAME.idx, as Megatron-LM, NeMo and fairseq write them.

fairseq's variant of the index lists no documents, so that each of its sequences is one. The older
index, `TNTIDX`, is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.errors import DataError
from flatout.files import Array
from flatout.token_formats import Piece, Reading, TokenFormat, Tokens, damaged

MAPPED = b"MMIDIDX\x00\x00"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
"""Integer types by their number in an index."""
GROUP = 1 << 18
"""Sequences that are read at a time."""


@dataclass(frozen=True)
class _Index:
    """The sequences of a dataset."""

    dtype: np.dtype[np.generic]
    sizes: Array
    """The tokens of each sequence."""
    starts: Array
    """The first byte of each sequence."""
    documents: Array | None
    """The number of each document's first sequence, and the number of sequences."""


def takes(path: Path) -> bool:
    """Return whether a path is a data file with an index, the index, or both without suffix."""
    return _prefix(path) is not None


def _prefix(path: Path) -> Path | None:
    """Return the common path of data file and index without suffix, or None."""
    if path.suffix.lower() in (".bin", ".idx"):
        prefix = path.with_suffix("")
        return prefix if path.is_file() and _beside(prefix, ".idx").is_file() else None
    return path if not path.exists() and _beside(path, ".idx").is_file() else None


def _beside(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def files(path: Path) -> tuple[Path, Path]:
    """Return the data file and its index.

    Raises: DataError when the data file is missing.
    """
    prefix = _prefix(path) or path
    data, index = _beside(prefix, ".bin"), _beside(prefix, ".idx")
    if not data.is_file():
        raise DataError(
            f"{index} is the index of {data}, which does not exist.",
            fix="Copy both files into one directory.",
        )
    return data, index


def open_megatron(path: Path, reading: Reading) -> Tokens:
    """Open a data file and its index.

    Raises: DataError when the index is damaged, or does not describe the data file.
    """
    data, index_path = files(path)
    index = _read_index(index_path)
    total = int(np.sum(index.sizes, dtype=np.int64))
    _require_in_order(index, data, index_path)
    if data.stat().st_size != total * index.dtype.itemsize:
        raise damaged(
            data,
            f"has {data.stat().st_size:,} bytes, and its index describes {total:,} tokens of "
            f"{index.dtype.name}",
        )
    if not total:
        raise damaged(data, "contains no tokens")

    def pieces() -> Iterator[Piece]:
        tokens = np.memmap(data, index.dtype, "r")
        first = taken = 0
        for group in range(0, len(index.sizes), GROUP):
            ends = first + np.cumsum(index.sizes[group : group + GROUP], dtype=np.int64)
            stop = int(ends[-1])
            found, taken = _ends_of_documents(index, group, ends, taken)
            if stop > first:
                part, ends = tokens[first:stop], found[found > first] - first
                yield Piece(part, str(data), len(part), ends, first, is_last=stop == total)
            first = stop

    return Tokens(total, "tokens", pieces)


FORMAT = TokenFormat(takes=takes, files=files, open=open_megatron, documents="stored")


def _ends_of_documents(index: _Index, group: int, ends: Array, taken: int) -> tuple[Array, int]:
    """Return where documents end, given where the sequences of a group end.

    `taken` entries of the list of documents were used for earlier groups; the new number is
    returned too.
    """
    if index.documents is None:
        return np.unique(ends), taken
    found = []
    while taken < len(index.documents):
        part = np.asarray(index.documents[taken : taken + GROUP])
        count = int(np.searchsorted(part, group + len(ends), "right"))
        found.append(part[:count])
        taken += count
        if count < len(part):
            break
    sequences = np.concatenate(found) if found else np.empty(0, np.int64)
    return np.unique(ends[sequences[sequences > group] - group - 1]), taken


def _require_in_order(index: _Index, data: Path, index_path: Path) -> None:
    """Check that the sequences follow each other in the data file, as every builder writes them.

    Raises: DataError.
    """
    end = 0
    for group in range(0, len(index.sizes), GROUP):
        sizes = np.asarray(index.sizes[group : group + GROUP], np.int64) * index.dtype.itemsize
        ends = end + np.cumsum(sizes)
        starts = index.starts[group : group + GROUP]
        if (sizes < 0).any() or not np.array_equal(starts, ends - sizes):
            raise damaged(index_path, f"does not describe {data.name} in order")
        end = int(ends[-1])


def _read_index(path: Path) -> _Index:
    """Return the index in a file.

    Raises: DataError when it is neither kind, or its size is not that of its content.
    """
    with path.open("rb") as file:
        head = file.read(64)
    try:
        if head.startswith(MAPPED):
            return _read_mapped(path, head)
    except struct.error as error:
        raise damaged(path, "is truncated") from error
    raise DataError(
        f"{path} is not an index of Megatron: it starts with {head[:9]!r}.",
        fix="If the .bin file beside it is nanoGPT's, move the .idx file away.",
    )


def _read_mapped(path: Path, head: bytes) -> _Index:
    version, code, count, documents = struct.unpack_from("<QBQQ", head.ljust(34, b"\0"), 9)
    dtype = _dtype(path, version, code)
    size = path.stat().st_size
    after = size - 34 - 12 * count - 8 * documents
    with_documents = after in (0, count)  # a mode per sequence may follow
    if not with_documents:
        if size != 26 + 12 * count:
            raise damaged(path, f"is truncated or damaged: it states {count:,} sequences")
        documents = 0
    start = 34 if with_documents else 26
    return _Index(
        dtype,
        _array(path, "<i4", count, start),
        _array(path, "<i8", count, start + 4 * count),
        _documents(path, documents, start + 12 * count, count),
    )


def _dtype(path: Path, version: int, code: int) -> np.dtype[np.generic]:
    if version != 1:
        raise DataError(
            f"{path} is an index of version {version}; version 1 is known.",
            fix="Write the dataset again with a released version of Megatron-LM.",
        )
    if code not in DTYPES:
        raise damaged(path, f"states the type {code}, which is not one of integers")
    return np.dtype(DTYPES[code])


def _array(path: Path, dtype: str, count: int, offset: int) -> Array:
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset=offset, shape=(count,))


def _documents(path: Path, count: int, offset: int, num_sequences: int) -> Array | None:
    """Return the documents' first sequences; None when the index lists none."""
    if count <= 1:  # only a 0: the builder was never told where a document ends
        return None
    found = _array(path, "<i8", count, offset)
    end = 0
    for group in range(0, count, GROUP):
        part = np.concatenate(([end], found[group : group + GROUP]))
        if (np.diff(part) < 0).any():
            raise damaged(path, "lists documents out of order")
        end = int(part[-1])
    if end > num_sequences:
        raise damaged(path, f"lists a document after the last of {num_sequences:,} sequences")
    return np.append(found, num_sequences) if end < num_sequences else found
