"""Megatron's indexed datasets: NAME.bin with NAME.idx, as Megatron-LM, NeMo and fairseq write them.

fairseq's variant of the index lists no documents, so that each of its sequences is one. The older
index, `TNTIDX`, is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.data.token_formats import Piece, Reading, TokenFormat, Tokens, damaged
from flatout.errors import DataError
from flatout.storage.files import Array

MAPPED = b"MMIDIDX\x00\x00"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
"""Integer types by their number in an index."""


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

    Memory: 8 bytes per sequence, a few times.
    Raises: DataError when the index is damaged, or does not describe the data file.
    """
    data, index = files(path)
    dtype, document_ends = _read_index(index, data)
    total = int(document_ends[-1]) if len(document_ends) else 0
    if data.stat().st_size != total * dtype.itemsize:
        raise damaged(
            data,
            f"has {data.stat().st_size:,} bytes, but its index describes {total:,} tokens of "
            f"{dtype.name}",
        )
    if not total:
        raise damaged(data, "contains no tokens")

    def pieces() -> Iterator[Piece]:
        yield Piece(np.memmap(data, dtype, "r"), str(data), total, document_ends)

    return Tokens(total, "tokens", pieces)


FORMAT = TokenFormat(takes=takes, files=files, open=open_megatron, documents="stored")


def _read_index(path: Path, data: Path) -> tuple[np.dtype[np.generic], Array]:
    """Return the type of a dataset's tokens, and where its documents end, in tokens.

    Raises: DataError when it is not an index, or its size is not that of its content.
    """
    with path.open("rb") as file:
        head = file.read(34)
    if not head.startswith(MAPPED):
        raise DataError(
            f"{path} is not an index of Megatron: it starts with {head[:9]!r}.",
            fix="If the .bin file beside it is nanoGPT's, move the .idx file away.",
        )
    if len(head) < 26:
        raise damaged(path, "is truncated")
    version, code, count, num_documents = struct.unpack_from("<QBQQ", head.ljust(34, b"\0"), 9)
    if version != 1:
        raise DataError(
            f"{path} is an index of version {version}. Version 1 is known.",
            fix="Write the dataset again with a released version of Megatron-LM.",
        )
    if code not in DTYPES:
        raise damaged(path, f"states the type {code}, which is not one of integers")
    dtype, size = np.dtype(DTYPES[code]), path.stat().st_size
    start = 34
    if size - 34 - 12 * count - 8 * num_documents not in (0, count):  # a mode each may follow
        if size != 26 + 12 * count:
            raise damaged(path, f"is truncated or damaged: it states {count:,} sequences")
        start, num_documents = 26, 0
    sizes = np.fromfile(path, "<i4", count, offset=start)
    starts = np.fromfile(path, "<i8", count, offset=start + 4 * count)
    documents = np.fromfile(path, "<i8", num_documents, offset=start + 12 * count)
    ends = np.cumsum(sizes, dtype=np.int64)
    if (sizes < 0).any() or not np.array_equal(starts, (ends - sizes) * dtype.itemsize):
        raise damaged(path, f"does not describe {data.name} in order")
    if num_documents > 1:  # else only a 0: the builder was never told where a document ends
        if (np.diff(documents, prepend=0) < 0).any():
            raise damaged(path, "lists documents out of order")
        if documents[-1] > count:
            raise damaged(path, f"lists a document after the last of {count:,} sequences")
        ends = np.append(ends[documents[documents > 0] - 1], ends[-1:])
    ends = np.unique(ends)
    return dtype, ends[ends > 0]
