"""Input files as they were when listed, to detect changes while preparing, and their pieces."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from flatout.data.sources.packed import unreadable


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: all of it, the rows that start in a range of bytes, or row groups."""

    path: str
    start: int
    """Its first byte, or row group."""
    end: int | None
    """The byte or row group after it. None for the end of the file."""
    num_bytes: int
    """Approximate bytes of text."""
    first_row: int = 0
    """Number of rows before the row groups."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read, as it was when it was listed."""

    path: str
    """Its path or URL."""
    name: str
    """Its name inside the directory or pattern, or its URL."""
    size: int
    mark: str = ""
    """The server's checksum or date of its content. For a local file, the fingerprint with `limit`.
    """
    listed: str = ""
    """The URL that was listed to find it: its own, a directory's, or a pattern."""
    stat: os.stat_result | None = None
    """The status of a local file."""
    limit: int = 0

    def has_changed(self) -> bool:
        """Return whether a local file's size, modification time or content has changed.

        The content is read again only if the file was touched and its modification time restored,
        or if it was replaced by a copy.
        """
        assert self.stat is not None
        before = self.stat
        try:
            now = Path(self.path).stat()
        except FileNotFoundError:
            return True
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            return True
        if (now.st_ctime_ns, now.st_ino) == (before.st_ctime_ns, before.st_ino):
            return False
        return fingerprint(Path(self.path), self.size, self.limit) != self.mark


def fingerprint(file: Path, size: int, limit: int) -> str:
    """Return a digest of a file, or of sixteen evenly spaced blocks if it exceeds `limit` bytes."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            if size <= limit:
                while block := stream.read(1 << 20):
                    digest.update(block)
            else:
                length = limit // 16
                for index in range(16):
                    stream.seek((size - length) * index // 15)
                    digest.update(stream.read(length))
    except OSError as error:
        raise unreadable(str(file), error) from error
    return digest.hexdigest()
