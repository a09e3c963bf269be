"""Files that text is read from, as they were when a source listed them: whether they are still the
same when all of it has been read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flatout.sources.packed import unreadable


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of this machine when it was listed, before anything was read of it."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    digest: str
    """Its fingerprint, of `limit` bytes."""
    limit: int

    def has_changed(self) -> bool:
        """Say whether the file has another size, modification time or content, or is gone.

        Its content is read again only where something has touched the file and put the modification
        time back, or a copy has replaced it.
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
    """A file at an address, as its server described it when it was listed."""

    address: str
    asked: str
    """The address that was listed: the file's own, that of a folder, or a pattern."""
    size: int
    mark: str
    """Its checksum or date; empty where the server gives none."""


Original = LocalFile | RemoteFile


def fingerprint(file: Path, size: int, limit: int) -> str:
    """Return a digest of the content; of a file over `limit` bytes, of sixteen blocks spread evenly
    over it.
    """
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
