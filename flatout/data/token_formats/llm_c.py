"""Tokens with the header of llm.c and modded-nanogpt: fineweb_train_000001.bin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.data.token_formats import Piece, Reading, TokenFormat, Tokens, damaged
from flatout.storage.recognised import LLM_C

HEADER = np.dtype("<i4")
HEADER_BYTES = 1024
"""256 numbers: the magic number, the version, the number of tokens, and zeros."""


def takes(path: Path) -> bool:
    """Return whether a file starts with one of llm.c's magic numbers."""
    if path.suffix.lower() != ".bin" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) in LLM_C


def open_llm_c(path: Path, reading: Reading) -> Tokens:
    """Open a file of llm.c. Its header states the type and the number of tokens.

    Raises: DataError when the file does not have that number of tokens.
    """
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise damaged(path, f"is truncated: it has {len(head)} bytes, less than llm.c's header")
    dtype = np.dtype(LLM_C[head[:4]]).newbyteorder("<")
    stated = int(np.frombuffer(head, HEADER)[2])
    count, rest = divmod(path.stat().st_size - HEADER_BYTES, dtype.itemsize)
    if count != stated or rest or not count:
        raise damaged(path, f"states {stated:,} tokens in its header, but contains {count:,}")

    def pieces() -> Iterator[Piece]:
        tokens = np.memmap(path, dtype, "r", offset=HEADER_BYTES)
        yield Piece(tokens, str(path), weight=count)

    return Tokens(count, "tokens", pieces)


FORMAT = TokenFormat(takes=takes, files=lambda path: (path,), open=open_llm_c)
