"""Packed text, told by the ending of its name: .gz, .bz2, and .zst with the package zstandard."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
from collections.abc import Callable
from typing import IO, Any, cast

from flatout.errors import DataError, MissingPackage
from flatout.transfer.reading import open_remote
from flatout.transfer.urls import is_url, name_in

_BLOCK = 1 << 16
_FED_BYTES = 1 << 10
"""Packed bytes given to zstandard at a time: it returns all that they unpack to, which may be
32,768 times as much.
"""
_READ_BYTES = 1 << 18
"""Asked of the system at a time: rows are often longer than its usual 8 KiB."""
CANNOT_BE_READ = "cannot be read"
"""The reason under which what is left of a damaged file is counted."""


class Damaged(OSError):
    """Packed bytes that do not unpack; what reads files makes a bad row of it."""


class Unread(DataError):
    """A file that cannot be read on from some place; what reads files makes a bad row of its rest."""

    reason = CANNOT_BE_READ
    """Under which it is counted."""


class NotHandedOut(DataError):
    """A file that the system does not hand out: no fault of the text, so no bad row; another time
    it may.
    """


def open_bytes(path: str) -> IO[bytes]:
    """Open a file, here or at an address, for reading; what is packed comes unpacked.

    Raises: MissingPackage when it takes a package that is not installed; DataError when the address
            does not give it.
    """
    opener = next(
        (opener for ending, opener in _OPENERS.items() if name_in(path).lower().endswith(ending)),
        None,
    )
    return opener(path) if opener else _open_plain(path)


def _open_plain(path: str) -> IO[bytes]:
    return open_remote(path) if is_url(path) else open(path, "rb", buffering=_READ_BYTES)


def is_packed(name: str) -> bool:
    """Return whether a file of this name is packed."""
    return name_in(name).lower().endswith(tuple(_OPENERS))


def unpacked_name(name: str) -> str:
    """Return the name less the ending that says how it is packed."""
    return name_in(name).rpartition(".")[0] if is_packed(name) else name_in(name)


def require_opener(path: str) -> None:
    """Do nothing when what it takes to open the file is installed: known before any of it is read.

    Raises: MissingPackage with its install line.
    """
    if name_in(path).lower().endswith(".zst"):
        _zstandard(path)


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a file that the system does not hand out, which is NotHandedOut, or that
    does not unpack.
    """
    of_system = isinstance(error, OSError) and error.errno is not None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    kind = NotHandedOut if of_system else DataError
    return kind(
        f"{path} cannot be read: {reason.rstrip('.')}.",
        fix="Check that the file is whole and that you may read it.",
    )


def _open_zstd(path: str) -> IO[bytes]:
    zstandard = _zstandard(path)
    file = _open_plain(path)  # first, so that no reader is left without one; closed with the reader
    return cast(IO[bytes], io.BufferedReader(_ZstdReader(file, zstandard), buffer_size=1 << 20))


def _zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise MissingPackage(
            f"Reading {path} takes the package zstandard, which is not installed.",
            fix='Install it: `pip install "flatout[zstd]"`.',
        ) from error


class _ZstdReader(io.RawIOBase):
    """The content of a .zst file, frame by frame. The package's own reader takes a file that is cut
    short for a shorter one.
    """

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._zstandard = zstandard
        self._file = file
        self._frame: Any = None
        self._packed = memoryview(b"")
        self._held = memoryview(b"")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Put the next bytes into `buffer`; return how many, 0 at the end.

        Raises: Damaged when the file is, EOFError when it is cut short.
        """
        while not self._held:
            self._packed = self._packed or memoryview(self._file.read(_BLOCK))
            if not self._packed:
                if self._frame is None:
                    return 0
                raise EOFError("it is cut short")
            self._held = memoryview(self._unpacked())
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _unpacked(self) -> bytes:
        """Return what the next packed bytes unpack to."""
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

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        finally:
            super().close()


_OPENERS: dict[str, Callable[[str], IO[bytes]]] = {
    ".gz": lambda path: cast(
        IO[bytes],
        gzip.GzipFile(fileobj=open_remote(path)) if is_url(path) else gzip.GzipFile(path),
    ),
    ".bz2": lambda path: cast(IO[bytes], bz2.BZ2File(open_remote(path) if is_url(path) else path)),
    ".zst": _open_zstd,
}
