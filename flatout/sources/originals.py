"""Records source files as they were when listed, to detect changes while preparing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flatout.sources.packed import unreadable


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A local file as it was listed, before it was read."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    digest: str
    """Its fingerprint with this `limit`."""
    limit: int

    def has_changed(self) -> bool:
        """Return whether the file's size, modification time or content has changed, or it is gone.

        The content is read again only if the file was touched and its modification time restored,
        or if it was replaced by a copy.
        """
        try:
            now = Path(self.path).stat()
        except FileNotFoundError:
            return True
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            return True
        if (now.st_ctime_ns, now.st_ino) == (self.ctime_ns, self.inode):
            return False
        return fingerprint(Path(self.path), self.size, self.limit) != self.digest


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A remote file as its server described it when it was listed."""

    url: str
    asked: str
    """The URL that was listed: the file's own, a folder's, or a pattern."""
    size: int
    mark: str
    """Its checksum or date; empty when the server reports neither."""


Original = LocalFile | RemoteFile


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
