"""Opens compressed files by suffix: .gz, .bz2, and .zst with the package zstandard."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
from collections.abc import Iterator
from types import ModuleType
from typing import IO, Any

from flatout.errors import DataError, MissingPackage
from flatout.storage.remote.reading import open_remote
from flatout.storage.remote.urls import is_url, name_in

_BLOCK = 1 << 16
_FED_BYTES = 1 << 10
"""Compressed bytes passed to zstandard at a time: they may expand by a factor of 32,768."""
_READ_BYTES = 1 << 18
"""Bytes per read call: rows are often longer than the default of 8 KiB."""


class Damaged(OSError):
    """Compressed bytes that cannot be decompressed. Readers report a bad row."""


class NotHandedOut(DataError):
    """A file that cannot be read: not a bad row, because the text is not at fault."""


def open_bytes(path: str) -> IO[bytes]:
    """Open a local or remote file for reading, decompressing it if needed.

    Raises: MissingPackage; DataError when the server does not return the file.
    """
    require_opener(path)
    file: Any = open_remote(path) if is_url(path) else path
    if file is path and not path.lower().endswith((".gz", ".bz2")):
        file = open(path, "rb", _READ_BYTES)  # noqa: SIM115
    content: IO[bytes] = unpacked(file, path)
    return content


def unpacked(file: Any, name: str) -> Any:
    """Return the decompressed content of a file, if its name says that it is compressed.

    `file` is open, or the path of a file that gzip or bz2 opens.

    Raises: MissingPackage.
    """
    suffix = name_in(name).lower()[-4:]
    if suffix.endswith(".gz"):
        return gzip.open(file)
    if suffix == ".bz2":
        return bz2.BZ2File(file)
    zstandard = require_opener(name)
    if zstandard is None:
        return file
    pieces = ConvertedFile(file, _unpacked(file, zstandard))
    return io.BufferedReader(pieces, buffer_size=1 << 20)


def is_packed(name: str) -> bool:
    """Return whether a file of this name is compressed."""
    return name_in(name).lower().endswith((".gz", ".bz2", ".zst"))


def unpacked_name(name: str) -> str:
    """Return a name without its compression suffix."""
    return name_in(name).rpartition(".")[0] if is_packed(name) else name_in(name)


def require_opener(path: str) -> ModuleType | None:
    """Return the package needed to open a file, if any.

    Raises: MissingPackage with the install line.
    """
    if name_in(path).lower().endswith(".zst"):
        return import_package("zstandard", path, extra="zstd")
    return None


def unreadable(path: str, error: OSError) -> NotHandedOut:
    """Return the error for a file that cannot be opened."""
    return NotHandedOut(
        f"{path} cannot be read: {(error.strerror or str(error)).rstrip('.')}.",
        fix="Check that the file is complete and that you may read it.",
    )


class ConvertedFile(io.RawIOBase):
    """A file's content as pieces of converted bytes. Closing it closes the file."""

    def __init__(self, file: IO[bytes], pieces: Iterator[bytes]) -> None:
        self._file = file
        self._pieces = pieces
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Copy the next bytes into `buffer` and return their number, 0 at the end."""
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        finally:
            super().close()


def _unpacked(file: IO[bytes], zstandard: ModuleType) -> Iterator[bytes]:
    """Decompress a .zst file by frame because zstandard's own reader accepts truncated files.

    Raises: Damaged; EOFError when the file is truncated.
    """
    frame: Any = None
    while block := memoryview(file.read(_BLOCK)):
        while block:
            fed = block[:_FED_BYTES]
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(fed)
            except zstandard.ZstdError as error:
                raise Damaged(str(error)) from error
            block = block[len(fed) - len(frame.unused_data) :]
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("it is truncated")


def import_package(module: str, path: str, *, extra: str) -> ModuleType:
    """Import and return a module that is needed to read `path`.

    Raises: MissingPackage with the install line.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"Reading {path} needs the package {module.partition('.')[0]}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{extra}]"`.',
        ) from error
