"""Reads remote files in blocks. A block that fails or arrives short is requested again."""

from __future__ import annotations

import glob
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from flatout.errors import DataError
from flatout.storage.remote.connection import NothingThere, open_filesystem, with_retries
from flatout.storage.remote.urls import name_in, protocol_of

BLOCK_BYTES = 2 << 20
"""Size of the first request, and of one after a jump or an error."""
LARGEST_BLOCK_BYTES = 16 << 20
"""Size to which the requests of a sequential reader grow: each one costs the server's latency."""

_UNPACKED = {"headers": {"Accept-Encoding": "identity"}}
_READ_OPTIONS: dict[str, Mapping[str, object]] = {
    "hf": {"cache_type": "none"},
    "http": _UNPACKED,
    "https": _UNPACKED,
}
"""Makes a filesystem return exactly the requested bytes: no read-ahead, no ranges of a compressed
response.
"""
_MARKS = (  # noqa: SIM905
    "ETag etag lfs blob_id md5Hash crc32c content_md5 Content-MD5 Digest "
    "Last-Modified LastModified mtime updated created"
).split()
"""Keys of a file's description that change with its content, the most reliable first."""
_DOWNLOAD_IT = "Download it, and give the path of the file."

Description = dict[str, Any]
"""A file as fsspec describes it: `name`, `size`, `type`, and the server's own keys."""


@dataclass(frozen=True)
class RemoteEntry:
    """One remote file, as its server describes it."""

    url: str
    size: int
    mark: str
    """The key and value of its checksum or date, which changes when the content changes."""


def open_remote(url: str) -> IO[bytes]:
    """Open a remote file for reading.

    Raises: DataError when it does not exist, may not be read, or the server fails; MissingPackage.
    """
    return cast(IO[bytes], io.BufferedReader(RemoteFile(url), buffer_size=1 << 16))


class RemoteFile(io.RawIOBase):
    """A seekable remote file. A short response is requested again, not taken as the file's end.

    Each request of a sequential reader is twice as large as the one before, up to 16 MiB.

    Raises: DataError when the file does not exist or may not be read, or, with the byte, when the
            server keeps failing.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._filesystem, self._path = open_filesystem(url)
        description = with_retries(url, lambda: self._filesystem.info(self._path))
        self.size = _entry(url, description).size
        self._options = _READ_OPTIONS.get(protocol_of(url), {})
        self._position = 0
        self._start = 0
        self._block = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a byte and return its offset."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(origin + offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Copy the next bytes into `buffer` and return their number, 0 at the end."""
        if self._position >= self.size or not len(buffer):
            return 0
        if not self._start <= self._position < self._start + len(self._block):
            is_sequential = self._position == self._start + len(self._block)
            num_bytes = min(2 * len(self._block), LARGEST_BLOCK_BYTES) if is_sequential else 0
            self._start = self._position
            self._block = self._fetch(self._start, max(num_bytes, BLOCK_BYTES))
        offset = self._position - self._start
        piece = memoryview(self._block)[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _fetch(self, start: int, num_bytes: int) -> bytes:
        sizes = iter([num_bytes])

        def fetch() -> bytes:
            end = min(start + next(sizes, BLOCK_BYTES), self.size)
            block: bytes = self._filesystem.cat_file(
                self._path, start=start, end=end, **self._options
            )
            if len(block) == end - start:
                return block
            if len(block) == self.size:
                raise DataError(
                    f"{self._url} cannot be read in blocks: the server ignores ranges.",
                    fix=_DOWNLOAD_IT,
                )
            raise EOFError(f"got {len(block):,} bytes of {end - start:,}")

        return with_retries(self._url, fetch, where=f" at byte {start:,}")


def find_remote(url: str, wanted: Callable[[str], bool]) -> list[RemoteEntry]:
    """Return the files at a URL, sorted: a single file, the matches of a pattern, or a directory's.

    `wanted` selects the files of a directory by their names inside it. A pattern matches any file.

    Raises: DataError when there are none, they may not be read, or the server fails;
            MissingPackage.
    """
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()

    def search() -> list[RemoteEntry]:
        if glob.has_magic(name_in(url)):
            found = filesystem.glob(path, detail=True)
        else:
            top = filesystem.info(path)
            if top["type"] != "directory":
                return [_entry(url, top)]
            found = {
                name: description
                for name, description in filesystem.find(path, detail=True).items()
                if wanted(name.removeprefix(top["name"]))
            }
        return [
            _entry(filesystem.unstrip_protocol(name), description)
            for name, description in found.items()
            if description["type"] == "file"
        ]

    entries = sorted(with_retries(url, search), key=lambda entry: entry.url)
    if not entries:
        raise DataError(
            f"No file matches {url}.",
            fix="Check the URL: directories are searched for text files, patterns match any file.",
        )
    return entries


def _entry(url: str, description: Description) -> RemoteEntry:
    if description["type"] == "directory":
        raise DataError(f"{url} is a directory.", fix="Name a file in it, or a pattern.")
    if description.get("size") is None:
        raise DataError(f"The server does not report the size of {url}.", fix=_DOWNLOAD_IT)
    key = next(filter(description.get, _MARKS), "")
    value = description.get(key)
    return RemoteEntry(
        url, int(description["size"]), f"{key}={getattr(value, 'sha256', value)}" if key else ""
    )


def read_if_there(url: str) -> bytes | None:
    """Return the content of a small remote file, or None when there is none.

    Raises: Unreachable when every attempt failed; DataError when it may not be read;
            MissingPackage.
    """
    filesystem, path = open_filesystem(url)

    def read() -> bytes:
        content: bytes = filesystem.cat_file(path, **_READ_OPTIONS.get(protocol_of(url), {}))
        return content

    try:
        return with_retries(url, read)
    except NothingThere:
        return None
