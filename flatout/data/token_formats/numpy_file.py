"""NumPy arrays of numpy.save: .npy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from flatout.data.token_formats import (
    Piece,
    Reading,
    TokenFormat,
    Tokens,
    damaged,
    require_tokens,
)
from flatout.errors import DataError

_PICKLED = (b"\x80", b"(", b"]", b"}")
"""How a pickle starts. numpy.save and numpy.load know files of this kind too."""


def takes(path: Path) -> bool:
    """Return whether a path is an .npy file."""
    return path.suffix.lower() == ".npy" and path.is_file()


def open_numpy(path: Path, reading: Reading) -> Tokens:
    """Open an array. The rows of a two-dimensional one follow each other.

    Raises: DataError when it is damaged, needs a pickle, or does not contain integers.
    """
    with path.open("rb") as file:
        shape, dtype = _header(file, str(path))
        offset = file.tell()
    count = math.prod(shape)
    if path.stat().st_size < offset + count * dtype.itemsize:
        raise damaged(path, f"is truncated: its header states {count:,} tokens of {dtype}")
    if not count:
        raise damaged(path, "contains no tokens")

    def pieces() -> Iterator[Piece]:
        tokens = np.memmap(path, dtype, "r", offset=offset, shape=(count,))
        yield Piece(tokens, str(path), weight=count)

    note = None
    if len(shape) > 1:
        note = f"{path.name} has {shape[0]:,} rows of {shape[1]:,} tokens, which follow each other."
    return Tokens(count, "tokens", pieces, note=note)


FORMAT = TokenFormat(takes=takes, files=lambda path: (path,), open=open_numpy)


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Return the shape and the type of an array, and leave the file at its first element.

    Raises: DataError for anything but an array of integers.
    """
    head = file.read(1)
    if head.startswith(_PICKLED):
        raise DataError(
            f"{where} is a pickle, which could run code. It is never read.",
            fix="Save the tokens as an array of integers: numpy.save(path, tokens).",
        )
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, in_columns, dtype = read(file)
    except (ValueError, EOFError) as error:
        raise damaged(where, "is not a NumPy array, or its header is damaged") from error
    require_tokens(dtype, shape, where)
    if in_columns and len(shape) > 1:
        raise DataError(
            f"{where} is stored in columns (Fortran order).",
            fix="Save it in rows: numpy.save(path, numpy.ascontiguousarray(tokens)).",
        )
    return shape, dtype
