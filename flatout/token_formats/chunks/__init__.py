"""Chunks of torch.save: a directory of chunk_NNNNNN.pt files, or one .pt file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flatout.files import Array
from flatout.recognised import CHUNK_NAME, LEGACY_TORCH
from flatout.token_formats import Piece, Reading, TokenFormat, Tokens
from flatout.token_formats.chunks.find import check_stated, find_chunks, read_metadata


def takes(path: Path) -> bool:
    """Return whether a path is a directory with chunks, or a file of torch.save."""
    if path.is_dir():
        return any(CHUNK_NAME.fullmatch(entry.name) for entry in path.iterdir())
    if path.suffix.lower() not in (".pt", ".pth", ".ckpt", ".bin") or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(len(LEGACY_TORCH))
    return path.suffix.lower() != ".bin" or head.startswith((b"PK\x03\x04", LEGACY_TORCH))


def files(path: Path) -> list[Path]:
    """Return the chunks in order.

    Raises: DataError when numbers are missing or duplicated.
    """
    return find_chunks(path) if path.is_dir() else [path]


def read_chunk(path: Path, reading: Reading) -> Array:
    """Return one chunk's tokens, without running any code in the file.

    Shapes:  returns (T,), integers.
    Raises: DataError when it is not one 1-D tensor of integers, or a dict with one.
    """
    from flatout.token_formats.chunks.torch_file import load_tokens  # torch

    return load_tokens(path, reading)


def open_chunks(path: Path, reading: Reading) -> Tokens:
    """Open chunks; what a metadata.json beside them states must be correct.

    Raises: DataError.
    """
    chunks = files(path)
    metadata = read_metadata(path) if path.is_dir() else {}
    check_stated(metadata, path, "chunks", len(chunks))
    check_stated(metadata, path, "ids", reading.vocab_size)

    def pieces() -> Iterator[Piece]:
        for chunk in chunks:
            yield Piece(read_chunk(chunk, reading), str(chunk))

    def check_total(num_tokens: int) -> None:
        check_stated(metadata, path, "tokens", num_tokens)

    return Tokens(len(chunks), "chunks", pieces, metadata, check_total=check_total)


FORMAT = TokenFormat(takes=takes, files=files, open=open_chunks)
