"""Remote files, through fsspec: read in blocks, each checked for its length and asked for again
when it does not come whole.
"""

from __future__ import annotations

import glob
import io
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import IO, Any, Literal, TypeVar, cast

from flatout.errors import DataError, FlatoutError, MissingPackage

BLOCK_BYTES = 2 << 20
"""So much is asked for at a time."""
ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
"""The wait before the second attempt; it doubles each time."""

_PACKAGES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "hf": ("huggingface_hub", "hub"),
}
_PACKAGES |= {"http": ("aiohttp", "http"), "https": ("aiohttp", "http")}
"""Package and extra that read a protocol."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "hf": {"cache_type": "none"},
    "http": {"headers": {"Accept-Encoding": "identity"}},
    "https": {"headers": {"Accept-Encoding": "identity"}},
}
"""What makes a filesystem give the bytes asked for and no others: no reading ahead, no ranges of a
packed answer.
"""
_CREDENTIALS = {
    "s3": "Give AWS credentials, for example by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by a profile.",
    "gs": "Log in with `gcloud auth application-default login`.",
    "hf": "Log in with `hf auth login`, and accept the terms on the repository's page where it has some.",
}
_MARKS = tuple(
    "ETag etag lfs blob_id md5Hash crc32c content_md5 Content-MD5 Digest Last-Modified LastModified mtime updated created".split()  # noqa: SIM905
)
"""Keys of a file's description that change with its content, the surest first."""
_INTERPRETING = {"reference"}
"""Filesystems that carry out what a file says: fsspec before 2026 fills in the templates of
`reference://` with whole Jinja, which can run code.
"""
_PLAIN = "Name the address itself: of one store, without `::`."
T = TypeVar("T")

Doing = Literal["read", "write"]
"""What is tried, as an error says it."""
_NOUNS = {"read": "Reading", "write": "Writing"}


class Unreachable(DataError):
    """A server that failed each time it was asked; another time it may answer."""


class NothingThere(DataError):
    """A server that answered that there is nothing at an address."""


@dataclass(frozen=True)
class RemoteEntry:
    """One remote file, as its server describes it."""

    address: str
    size: int
    mark: str
    """Checksum or date, with the key it stands under: changes when the content does, as far as the
    server says.
    """


def is_address(name: str) -> bool:
    """Return whether a name is an address such as `s3://bucket/key`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def name_of(address: str) -> str:
    """Return the path inside an address; what follows a `?` is no part of a web page's name."""
    return (
        urllib.parse.urlsplit(address).path
        if protocol_of(address) in ("http", "https")
        else address
    )


def open_remote(address: str) -> IO[bytes]:
    """Open a remote file for reading.

    Raises: DataError when it is not there, must not be read, or the server fails; MissingPackage.
    """
    return cast(IO[bytes], io.BufferedReader(RemoteFile(address), buffer_size=1 << 16))


class RemoteFile(io.RawIOBase):
    """A remote file that can be read from anywhere. An answer that is short is no end of file: it
    is asked for again.

    Raises: DataError when it is not there, must not be read, or, with the byte, when the server
            fails for good.
    """

    def __init__(self, address: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._address = address
        self._sleep = sleep
        self._filesystem, self._path = locate(address)
        self.size = _entry(
            address, patiently(address, lambda: self._filesystem.info(self._path), sleep)
        ).size
        self._options = _OPTIONS.get(protocol_of(address), {})
        self._position = 0
        self._start = 0
        self._block = b""

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte and return it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(origin + offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Put the next bytes into `buffer`; return how many, 0 at the end."""
        if self._position >= self.size or not len(buffer):
            return 0
        if not self._start <= self._position < self._start + len(self._block):
            self._block = self._fetched(
                self._position, min(self._position + BLOCK_BYTES, self.size)
            )
            self._start = self._position
        offset = self._position - self._start
        piece = memoryview(self._block)[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _fetched(self, start: int, end: int) -> bytes:
        def fetch() -> bytes:
            block: bytes = self._filesystem.cat_file(
                self._path, start=start, end=end, **self._options
            )
            if len(block) == end - start:
                return block
            if len(block) == self.size:
                raise DataError(
                    f"{self._address} cannot be read in pieces: the server ignores ranges.",
                    fix="Download it, and name the file.",
                )
            raise EOFError(f"it gave {len(block):,} bytes of {end - start:,}")

        return patiently(self._address, fetch, self._sleep, f" at byte {start:,}")


def find_remote(
    address: str, wanted: Callable[[str], bool], *, sleep: Callable[[float], None] = time.sleep
) -> list[RemoteEntry]:
    """Return the files that an address stands for, sorted: itself, those its pattern matches, or
    those `wanted` by name in its folder.

    Raises: DataError when there is none, or they must not be read, or the server fails;
            MissingPackage.
    """
    filesystem, path = locate(address)
    filesystem.invalidate_cache()

    def look() -> list[RemoteEntry]:
        if glob.has_magic(name_of(address)):
            return list(_entries(filesystem, filesystem.glob(path, detail=True), lambda _: True))
        found = filesystem.info(path)
        if found["type"] != "directory":
            return [_entry(address, found)]
        return list(
            _entries(
                filesystem,
                filesystem.find(path, detail=True),
                lambda name: wanted(name.removeprefix(found["name"])),
            )
        )

    entries = sorted(patiently(address, look, sleep), key=lambda entry: entry.address)
    if not entries:
        raise DataError(
            f"No file matches {address}.",
            fix="Check the address; a folder is searched for text, a pattern takes any file.",
        )
    return entries


def _entries(
    filesystem: Any, found: dict[str, dict[str, Any]], wanted: Callable[[str], bool]
) -> Iterator[RemoteEntry]:
    for path, described in found.items():
        if described["type"] == "file" and wanted(path):
            yield _entry(filesystem.unstrip_protocol(path), described)


def _entry(address: str, described: dict[str, Any]) -> RemoteEntry:
    if described["type"] == "directory":
        raise DataError(f"{address} is a folder.", fix="Name a file in it, or a pattern.")
    if described.get("size") is None:
        raise DataError(
            f"The server does not say how long {address} is.", fix="Download it, and name the file."
        )
    key = next((key for key in _MARKS if described.get(key)), None)
    value = described[key] if key is not None else None
    return RemoteEntry(
        address, int(described["size"]), f"{key}={getattr(value, 'sha256', value)}" if key else ""
    )


def protocol_of(address: str) -> str:
    """Return how an address begins, `s3` for example; `S3://` is the same."""
    return address.partition("://")[0].lower()


def read_remote(
    address: str, *, attempts: int = ATTEMPTS, sleep: Callable[[float], None] = time.sleep
) -> bytes:
    """Return what a small remote file holds.

    Raises: NothingThere; Unreachable when every attempt failed; DataError when it must not be read;
            MissingPackage.
    """
    filesystem, path = locate(address)

    def read() -> bytes:
        data: bytes = filesystem.cat_file(path, **_OPTIONS.get(protocol_of(address), {}))
        return data

    return patiently(address, read, sleep, attempts=attempts)


def locate(address: str, doing: Doing = "read") -> tuple[Any, str]:
    """Return the filesystem of an address and the path in it.

    Raises: MissingPackage; DataError for an address that no filesystem is for; Unreachable where
            its server has to answer first.
    """
    import fsspec

    protocol = protocol_of(address)
    if "::" in address or protocol in _INTERPRETING:
        raise DataError(
            f"{address} would be read through another filesystem, which may follow instructions in what it reads.",
            fix=_PLAIN,
        )
    try:
        filesystem, path = fsspec.core.url_to_fs(f"{protocol}://{address.partition('://')[2]}")
    except ImportError as error:
        package, extra = _PACKAGES.get(protocol, (str(error.name or protocol), ""))
        line = f'pip install "flatout[{extra}]"' if extra else f"pip install {package}"
        raise MissingPackage(
            f"{_NOUNS[doing]} {address} takes the package {package}, which is not installed.",
            fix=f"Install it: `{line}`.",
        ) from error
    except ValueError as error:
        known = "file, gs, hf, http, https, s3"
        raise DataError(
            f"{address}: {str(error).rstrip('.')}.", fix=f"Read are, among others: {known}."
        ) from error
    except OSError as error:
        raise Unreachable(
            f"Cannot {doing} {address}: {_said(error)}.",
            fix="Check the network and the server, and run it again.",
        ) from error
    return filesystem, str(path)


def patiently(
    address: str,
    action: Callable[[], T],
    sleep: Callable[[float], None] = time.sleep,
    where: str = "",
    *,
    doing: Doing = "read",
    attempts: int = ATTEMPTS,
) -> T:
    """Return what the action returns; when it fails in a way that may pass, try again a few times.

    Raises: Unreachable when every attempt failed; NothingThere, or another DataError, when trying
            again cannot help.
    """
    for attempt in range(attempts):
        if attempt:
            sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            return action()
        except (FlatoutError, CancelledError):
            raise
        except Exception as error:  # every filesystem has a family of errors of its own
            failed = _cause(address, error)
            if (final := _final(address, failed, doing)) is not None:
                raise final from error
    raise Unreachable(
        f"Cannot {doing} {address}{where}: {_said(failed) or type(failed).__name__} ({attempts} attempt{'s' * (attempts > 1)}).",
        fix="Check the network and the server, and run it again.",
    ) from failed


def _cause(address: str, error: Exception) -> Exception:
    """Return the error that matters: for a web page, the filesystem calls everything that goes
    wrong at first a missing file.
    """
    cause = error.__cause__
    if (
        protocol_of(address) in ("http", "https")
        and isinstance(error, FileNotFoundError)
        and isinstance(cause, Exception)
    ):
        return cause
    return error


def _said(error: Exception) -> str:
    """Return what an error says, on one line; of a web server's answer, its number and its words."""
    if hasattr(error, "status") and hasattr(error, "message"):
        return f"{error.status} {error.message}".strip()
    return next((line for line in str(error).splitlines() if line.strip()), "").strip().rstrip(".")


def _final(address: str, error: Exception, doing: Doing) -> DataError | None:
    """Return the error to raise when trying again cannot help, else None."""
    status = getattr(error, "status", None) or getattr(
        getattr(error, "response", None), "status_code", None
    )
    said = _said(error)
    if (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or type(error).__name__ == "NoCredentialsError"
    ):
        fix = _CREDENTIALS.get(protocol_of(address), "Check the address, and your rights there.")
        return DataError(
            f"{_NOUNS[doing]} {address} is not allowed: {said or 'forbidden'}.", fix=fix
        )
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        reason = f" ({said})" if said and said not in address else ""
        return NothingThere(f"There is nothing at {address}{reason}.", fix="Check the address.")
    if isinstance(error, NotImplementedError):
        return DataError(
            f"{_NOUNS[doing]} {address} is not possible: nothing does that for {protocol_of(address)}.",
            fix="Use another kind of address.",
        )
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return DataError(f"{address} is refused: {said}.", fix="Check the address.")
    return None
