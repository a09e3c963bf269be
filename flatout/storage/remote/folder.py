"""A directory at a URL: which files it has, and how one is sent and checked."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flatout.errors import DataError
from flatout.storage.files import PART, sync
from flatout.storage.remote.connection import byte_counter, open_filesystem, with_retries
from flatout.storage.remote.reading import Description, open_remote
from flatout.storage.remote.urls import is_local, protocol_of

PART_BYTES = 8 << 20
"""Larger files are sent in parts of this size. S3 derives its checksum from those of the parts."""
_WRITE_OPTIONS = {
    **{name: {"chunksize": PART_BYTES, "max_concurrency": 1} for name in ("s3", "s3a")},
    **{name: {"chunksize": PART_BYTES} for name in ("gs", "gcs")},
}
_READ_ONLY = ("http", "https", "hf")


class RemoteFolder:
    """A directory at a URL to which files are written.

    Raises: DataError when URLs of that kind are read-only; MissingPackage.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        protocol = protocol_of(url)
        if protocol in _READ_ONLY:
            raise DataError(
                f"{url}: URLs of this kind are read-only.",
                fix="For the Hugging Face hub, use `hf upload ORG/NAME DIR`. Else use s3:// or "
                "gs://, or write to a directory and copy it there.",
            )
        self._filesystem, self._path = open_filesystem(url, "write")
        self._options = _WRITE_OPTIONS.get(protocol, {})

    def files(self) -> dict[str, Description]:
        """Return the descriptions of the directory's files by name. Empty when it does not exist.

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

    def send(
        self,
        path: Path,
        name: str,
        sent: Description | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Send a file unless `sent` describes the same content, and check what has arrived.

        `advance` learns of bytes sent, a negative number before a retry. After a kill or an error,
        there is the earlier file of that name or the new one.

        Raises: DataError when it differs from the file. It is then removed.
        """
        with contextlib.suppress(DataError):  # what cannot be read back is sent again
            if sent is not None and self._holds(path, name, sent):
                advance(path.stat().st_size)
                return
        counter = byte_counter(advance)
        target = f"{self._path}/{name}"

        def put() -> None:
            counter.absolute_update(0)
            if is_local(self.url):  # a store replaces a file at once
                copy_local(path, Path(target))
                counter.absolute_update(path.stat().st_size)
            else:
                self._filesystem.put_file(str(path), target, callback=counter, **self._options)

        with_retries(self.url, put, where=f"/{name}", access="write")
        arrived = with_retries(f"{self.url}/{name}", lambda: self._filesystem.info(target))
        if not self._holds(path, name, arrived):
            self.remove(name)
            raise self.altered(name)

    def altered(self, name: str) -> DataError:
        """Return the error for a file that differs from the one that was sent."""
        return DataError(
            f"{self.url}/{name} differs from the file that was sent.",
            fix="Run the same command again. If this repeats, the store or the network alters "
            "files.",
        )

    def remove(self, name: str = "") -> None:
        """Remove a file, or the directory with all its files, if it exists."""

        def remove() -> None:
            self._filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if name:
                    self._filesystem.rm_file(f"{self._path}/{name}")
                else:
                    self._filesystem.rm(self._path, recursive=True)

        with_retries(self.url, remove, where=f"/{name}" * bool(name), access="write")

    def _holds(self, path: Path, name: str, description: Description) -> bool:
        """Return whether the described remote file has the size and the content of a local one.

        The content is compared by the MD5 that the store reports. If it differs, as in a store that
        encrypts, the file is read back.
        """
        if description.get("size") != path.stat().st_size:
            return False
        reported = _reported_md5(description)
        if reported is None or reported in _md5s(path):
            return True
        with path.open("rb") as file, open_remote(f"{self.url}/{name}") as remote:
            return all(
                block == remote.read(len(block))
                for block in iter(partial(file.read, PART_BYTES), b"")
            )


def copy_local(source: Path, target: Path) -> None:
    """Copy a file on this machine. What a kill leaves of it, the next copy replaces."""
    part = target.with_name(target.name + PART)
    part.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, part)
    sync(part)
    part.replace(target)


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
