"""Writes files to a directory at a URL and compares them with the local files."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from flatout.errors import DataError
from flatout.files import PART, FileEntry, sync
from flatout.transfer.connection import byte_counter, open_filesystem, with_retries
from flatout.transfer.reading import Description, checked_blocks
from flatout.transfer.urls import is_local, protocol_of

PART_BYTES = 8 << 20
"""Larger files are sent in parts of this size; S3 derives its checksum from those of the parts."""
_S3_OPTIONS = {"chunksize": PART_BYTES, "max_concurrency": 1}
_GCS_OPTIONS = {"chunksize": PART_BYTES}
_WRITE_OPTIONS = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS, "gs": _GCS_OPTIONS, "gcs": _GCS_OPTIONS}
_READ_ONLY = ("http", "https", "hf")


class RemoteFolder:
    """A directory at a URL to which files are written.

    Raises: DataError when URLs of that kind are read-only; MissingPackage.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        if protocol_of(url) in _READ_ONLY:
            raise DataError(
                f"{url}: URLs of this kind are read-only.",
                fix="Use s3:// or gs://, or write to a directory and copy it there.",
            )
        self._filesystem, self._path = open_filesystem(url, "write")
        self._options = _WRITE_OPTIONS.get(protocol_of(url), {})

    def files(self) -> dict[str, Description]:
        """Return the descriptions of the folder's files by name; empty when it does not exist.

        What a kill left of a file that was being written does not count.
        """

        def list_files() -> dict[str, Description]:
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}
            return {
                name: description
                for description in found
                if (
                    (name := description["name"].removeprefix(self._path).strip("/"))
                    or description["type"] == "file"
                )
                and not name.endswith(PART)
            }

        return with_retries(self.url, list_files)

    def describe(self, name: str) -> Description:
        """Return the store's description of a file."""
        return with_retries(
            f"{self.url}/{name}", lambda: dict(self._filesystem.info(f"{self._path}/{name}"))
        )

    def put(self, path: Path, name: str, advance: Callable[[int], None] = lambda _: None) -> None:
        """Send a file, reporting bytes sent to `advance`, a negative number before a retry.

        After a kill or an error, there is the earlier file of that name or the new one.
        """
        counter = byte_counter(advance)

        target = f"{self._path}/{name}"
        beside = f"{target}{PART}" if is_local(self.url) else target  # a store replaces it at once

        def send() -> None:
            counter.absolute_update(0)
            try:
                self._filesystem.put_file(str(path), beside, callback=counter, **self._options)
                if beside != target:
                    sync(Path(beside))
                    Path(beside).replace(target)
            finally:
                if beside != target:
                    with contextlib.suppress(OSError):
                        Path(beside).unlink(missing_ok=True)

        with_retries(self.url, send, where=f"/{name}", access="write")

    def put_text(self, name: str, text: str) -> None:
        """Write a small file."""
        with tempfile.NamedTemporaryFile("w", prefix="flatout-", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            self.put(Path(file.name), name)

    def send(
        self,
        path: Path,
        entry: FileEntry,
        sent: Description | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Send a file unless `sent` describes the same content, and check what has arrived.

        Raises: DataError when it differs from the file; it is then removed.
        """
        if sent is not None and self.holds(path, entry, sent):
            advance(entry.size_bytes)
            return
        self.put(path, entry.name, advance)
        if not self.holds(path, entry, self.describe(entry.name)):
            self.remove(entry.name)
            raise self.altered(entry.name)

    def altered(self, name: str) -> DataError:
        """Return the error for a file that differs from the one that was sent."""
        return DataError(
            f"{self.url}/{name} differs from the file that was sent.",
            fix="Run the same command again; if this repeats, the store or the network alters "
            "files.",
        )

    def delete(self) -> None:
        """Remove the directory with all its files, if it exists."""

        def delete() -> None:
            self._filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm(self._path, recursive=True)

        with_retries(self.url, delete, access="write")

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(f"{self._path}/{name}")

        with_retries(self.url, remove, where=f"/{name}", access="write")

    def holds(self, path: Path, entry: FileEntry, description: Description) -> bool:
        """Return whether the described remote file has the size and the content of a local one.

        The content is compared by the MD5 that the store reports. If it differs, as in a store that
        encrypts, the file is read back.
        """
        if description.get("size") != entry.size_bytes:
            return False
        reported = _reported_md5(description)
        return (
            reported is None
            or reported in _md5s(path)
            or all(
                problem is None for _, problem in checked_blocks(f"{self.url}/{entry.name}", entry)
            )
        )


def _reported_md5(description: Description) -> str | None:
    """Return the MD5 in a file's description, in S3's form, or None."""
    tag = str(description.get("ETag", "")).strip('"')
    if re.fullmatch(r"[0-9a-f]{32}(-\d+)?", tag):
        return tag
    return base64.b64decode(description["md5Hash"]).hex() if description.get("md5Hash") else None


def _md5s(path: Path) -> set[str]:
    """Return a file's MD5 and its S3 multipart checksum: the MD5 of its part MD5s, and a count."""
    whole, parts = hashlib.md5(usedforsecurity=False), []
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    joined = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return {whole.hexdigest(), f"{joined}-{len(parts)}"}
