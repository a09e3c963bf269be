"""Writing so that a file is whole or absent: a temporary name, a sync, a rename; and what a disk says when it refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.manifest import BLOCK_BYTES, FileEntry
from flatout.errors import DataError
from flatout.sources.local import expanded as expanded

Array = np.ndarray[Any, np.dtype[Any]]

PART = ".part"
"""What the name of a file ends in until it is whole."""
BROKEN = "That disk has failed to read or write (the system's log, `dmesg`, says more): check it, or use another; then run the same command again."
"""What to do about a disk that answers with EIO."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Unfinished(DataError):
    """Stopped half way by something other than the text: what is done stays, and the same command goes on from there."""


class CheckedFile:
    """A file being written under a temporary name, with a CRC-32 for every 4 MiB block; `close` gives it its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = _temporary(path)
        self._file = self._temporary.open("wb", buffering=1 << 20)
        self._crc = 0
        self._crcs: list[int] = []
        self._entry: FileEntry | None = None
        self.size = 0

    def write(self, items: Array) -> None:
        """Append the array's bytes."""
        data = np.ascontiguousarray(items).data.cast("B") if items.size else memoryview(b"")
        self._file.write(data)
        while data:
            piece = data[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._crc = zlib.crc32(piece, self._crc)
            self.size += len(piece)
            data = data[len(piece) :]
            if self.size % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0

    def close(self) -> FileEntry:
        """Sync, rename, and return the entry; the second time only return it."""
        if self._entry is None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
            crcs = self._crcs + [self._crc] * (self.size % BLOCK_BYTES != 0)
            self._entry = FileEntry(name=self.path.name, size_bytes=self.size, block_crc32=tuple(crcs))
        return self._entry

    def abandon(self) -> None:
        """Remove what is not closed, whatever the disk says."""
        if self._entry is None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()


def write_whole(path: Path, text: str) -> None:
    """Put `text` in `path` so that a reader, a kill or a power cut at any moment finds what was there before or all of it, never a part.

    After a power cut it may be what was there before, until the folder is synced.
    """
    _put(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole; when this returns, a power cut leaves it there."""
    write_whole(path, text)
    sync(path.parent)


def copy_whole(source: Path, path: Path) -> None:
    """Put a copy of a small file in `path`, whole or not at all."""
    _put(path, lambda temporary: shutil.copyfile(source, temporary))


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written under a temporary name, and give it its own; where the disk refuses, the temporary one goes again."""
    temporary = _temporary(path)
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_first(path: Path, write: Callable[[Path], object]) -> None:
    """Have a small file written whole, unless it is there: of several processes that do this at once, one does."""
    temporary = _temporary(path)
    write(temporary)
    sync(temporary)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PART}")


def check_blocks(path: Path, entry: FileEntry) -> bool:
    """Return whether a file has the size and the checksums of its entry."""
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    with path.open("rb") as file:
        return all(zlib.crc32(file.read(BLOCK_BYTES)) == crc for crc in entry.block_crc32)


def entry_of(path: Path) -> FileEntry:
    """Return the entry of a file that is there."""
    with path.open("rb") as file:
        crcs = tuple(zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b""))
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, block_crc32=crcs)


@contextlib.contextmanager
def writing(out: Path | str) -> Iterator[None]:
    """Turn what the disk refuses into a DataError that names the folder; what is done is kept where the disk is full or fails."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL or error.errno == errno.EIO:
            fix = unless_broken(error, "Make room there and run the same command again: it keeps what is done.")
            raise Unfinished(f"Cannot write {out}: {reason}.", fix=fix) from error
        raise DataError(f"Cannot write {out}: {reason}.", fix="Choose a folder you may write to, on a disk with room, with --out.") from error


def unless_broken(error: OSError, fix: str) -> str:
    """Return what to do when a disk refuses: `fix`, but for one that fails, which is not full."""
    return BROKEN if error.errno == errno.EIO else fix


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
