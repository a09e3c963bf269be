"""Tokens without a header, as nanoGPT writes them: train.bin and val.bin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.data.token_formats import DTYPES, Piece, Reading, TokenFormat, Tokens
from flatout.errors import DataError
from flatout.storage.recognised import HEAD_BYTES, LLM_C, NOT_TOKENS, is_text

SAMPLED_BYTES = 1 << 16
"""Bytes that are read at the start, in the middle and at the end to guess the type."""
ENOUGH = 8
"""Tokens of a type that a sample must contain to prefer it to a narrower one."""
_GUESSES = ("uint64", "uint32", "uint16")


def takes(path: Path) -> bool:
    """Return whether a path is a .bin file that no other format describes."""
    if path.suffix.lower() != ".bin" or not path.is_file():
        return False
    if path.with_suffix(".idx").exists() or (path.parent / "manifest.json").exists():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return head[:4] not in LLM_C and not head.startswith(NOT_TOKENS) and not is_text(head)


def guess_dtype(sample: bytes, vocab_size: int) -> str | None:
    """Return the widest unsigned type in which all tokens of a sample are in the vocabulary.

    A narrower type also fits, with zeros between the tokens. Signed and unsigned types store the
    same bytes. None when no type fits.
    """
    for name in _GUESSES:
        tokens = np.frombuffer(sample[: len(sample) // 8 * 8], f"<u{np.dtype(name).itemsize}")
        wide_enough = len(tokens) >= ENOUGH or name == _GUESSES[-1]
        if wide_enough and len(tokens) and int(tokens.max()) < vocab_size:
            return name
    return None


def sample_of(path: Path) -> bytes:
    """Return bytes of the start, the middle and the end of a file, whole words of 8 bytes."""
    size = path.stat().st_size // 8 * 8
    length = min(size, SAMPLED_BYTES)
    with path.open("rb") as file:
        found = []
        for start in sorted({0, (size - length) // 16 * 8, size - length}):
            file.seek(start)
            found.append(file.read(length))
    return b"".join(found)


def dtype_of(path: Path, reading: Reading) -> tuple[np.dtype[np.generic], bool]:
    """Return the type of a file's tokens, and whether it is a guess.

    Raises: DataError for an unknown type, or a size that is not a whole number of tokens.
    """
    if reading.dtype is not None and reading.dtype not in DTYPES:
        raise DataError(
            f"--dtype {reading.dtype!r} is not a type of tokens.", fix=f"Use {', '.join(DTYPES)}."
        )
    name = reading.dtype or guess_dtype(sample_of(path), reading.vocab_size)
    fallback = "uint16" if reading.vocab_size <= 1 << 16 else "uint32"
    dtype = np.dtype(name or fallback).newbyteorder("<")
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, which is not a whole number of {dtype.name} tokens.",
            fix="Copy the file again: it is probably truncated. If its tokens have a different "
            f"type, name it: --dtype {' or '.join(DTYPES[:3])}.",
        )
    return dtype, reading.dtype is None


def open_raw(path: Path, reading: Reading) -> Tokens:
    """Open a file of tokens without a header."""
    dtype, guessed = dtype_of(path, reading)
    count = path.stat().st_size // dtype.itemsize

    def pieces() -> Iterator[Piece]:
        yield Piece(np.memmap(path, dtype, "r"), str(path), weight=count)

    note = (
        f"{path.name} is read as {dtype.name}. --dtype names a different type." if guessed else None
    )
    return Tokens(count, "tokens", pieces, note=note)


FORMAT = TokenFormat(takes=takes, files=lambda path: (path,), open=open_raw)
