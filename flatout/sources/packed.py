"""Opens compressed files by suffix: .gz, .bz2, and .zst with the package zstandard."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any, cast

from flatout.errors import DataError, MissingPackage
from flatout.remote.reading import open_remote
from flatout.remote.urls import is_url, name_in

_BLOCK = 1 << 16
_FED_BYTES = 1 << 10
"""Compressed bytes passed to zstandard at a time: they may expand by a factor of 32,768."""
_READ_BYTES = 1 << 18
"""Bytes per read call: rows are often longer than the default of 8 KiB."""
CANNOT_BE_READ = "cannot be read"
"""Reason under which the rest of a damaged file is counted."""


class Damaged(OSError):
    """Compressed bytes that cannot be decompressed; readers report a bad row."""


class Unread(DataError):
    """A file that cannot be read past some point; readers report the rest as a bad row."""

    reason = CANNOT_BE_READ
    """Reason under which the row is counted."""


class NotHandedOut(DataError):
    """A file that the system refuses to read: not a bad row, because the text is not at fault."""


def open_bytes(path: str) -> IO[bytes]:
    """Open a local or remote file for reading, decompressing it if needed.

    Raises: MissingPackage; DataError when the server does not return the file.
    """
    opener = next(
        (opener for ending, opener in _OPENERS.items() if name_in(path).lower().endswith(ending)),
        None,
    )
    return opener(path) if opener else _open_plain(path)


def _open_plain(path: str) -> IO[bytes]:
    return open_remote(path) if is_url(path) else open(path, "rb", buffering=_READ_BYTES)


def is_packed(name: str) -> bool:
    """Return whether a file of this name is compressed."""
    return name_in(name).lower().endswith(tuple(_OPENERS))


def unpacked_name(name: str) -> str:
    """Return a name without its compression suffix."""
    return name_in(name).rpartition(".")[0] if is_packed(name) else name_in(name)


def require_opener(path: str) -> None:
    """Check that the package needed to open a file is installed.

    Raises: MissingPackage with the install line.
    """
    if name_in(path).lower().endswith(".zst"):
        _zstandard(path)


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a file that the system refuses to read (NotHandedOut) or is damaged."""
    of_system = isinstance(error, OSError) and error.errno is not None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    kind = NotHandedOut if of_system else DataError
    return kind(
        f"{path} cannot be read: {reason.rstrip('.')}.",
        fix="Check that the file is complete and that you may read it.",
    )


def _open_zstd(path: str) -> IO[bytes]:
    zstandard = _zstandard(path)
    file = _open_plain(path)  # closed with the reader
    return cast(IO[bytes], io.BufferedReader(_ZstdReader(file, zstandard), buffer_size=1 << 20))


def _zstandard(path: str) -> ModuleType:
    return import_package("zstandard", path, extra="zstd")


class ConvertedFile(io.RawIOBase):
    """A file's content converted piece by piece; closing it closes the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._piece = memoryview(b"")

    def next_piece(self) -> bytes | None:
        """Return the next bytes, which may be empty, or None at the end."""
        raise NotImplementedError

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Copy the next bytes into `buffer` and return their number, 0 at the end."""
        while not self._piece:
            piece = self.next_piece()
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


class _ZstdReader(ConvertedFile):
    """Decompresses a .zst file by frame because zstandard's own reader accepts truncated files."""

    def __init__(self, file: IO[bytes], zstandard: ModuleType) -> None:
        super().__init__(file)
        self._zstandard = zstandard
        self._frame: Any = None
        self._packed = memoryview(b"")

    def next_piece(self) -> bytes | None:
        """Return the next bytes, or None at the end.

        Raises: Damaged; EOFError when the file is truncated.
        """
        self._packed = self._packed or memoryview(self._file.read(_BLOCK))
        if self._packed:
            return self._unpacked()
        if self._frame is not None:
            raise EOFError("it is truncated")
        return None

    def _unpacked(self) -> bytes:
        """Decompress the next bytes."""
        fed = self._packed[:_FED_BYTES]
        self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            content: bytes = self._frame.decompress(fed)
        except self._zstandard.ZstdError as error:
            raise Damaged(str(error)) from error
        self._packed = self._packed[len(fed) - len(self._frame.unused_data) :]
        if self._frame.eof:
            self._frame = None
        return content


_OPENERS: dict[str, Callable[[str], IO[bytes]]] = {
    ".gz": lambda path: cast(
        IO[bytes],
        gzip.GzipFile(fileobj=open_remote(path)) if is_url(path) else gzip.GzipFile(path),
    ),
    ".bz2": lambda path: cast(IO[bytes], bz2.BZ2File(open_remote(path) if is_url(path) else path)),
    ".zst": _open_zstd,
}


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
