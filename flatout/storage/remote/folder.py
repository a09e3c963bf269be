"""Sends a directory to a URL (`push`) and fetches one (`pull`): its manifest comes last.

A directory with a manifest is complete. Until then, the claim there names the manifest that will
come: only a call with the same claim continues, and the others start again or are rejected.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np
from pydantic import Field

from flatout.display import amount
from flatout.errors import DataError
from flatout.progress import Progress
from flatout.storage.files import PART, CheckedFile, Stored, sync
from flatout.storage.json_io import JsonObject
from flatout.storage.remote.connection import (
    NothingThere,
    byte_counter,
    open_filesystem,
    with_retries,
)
from flatout.storage.remote.parallel import Advance, transfer_all
from flatout.storage.remote.reading import (
    BLOCK_BYTES,
    Description,
    open_remote,
    read_if_there,
)
from flatout.storage.remote.urls import is_local, protocol_of

MANIFEST, CLAIM = "manifest.json", "upload.json"
PART_BYTES = 8 << 20
"""Larger files are sent in parts of this size. S3 derives its checksum from those of the parts."""
_S3_OPTIONS = {"chunksize": PART_BYTES, "max_concurrency": 1}
_GCS_OPTIONS = {"chunksize": PART_BYTES}
_WRITE_OPTIONS = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS, "gs": _GCS_OPTIONS, "gcs": _GCS_OPTIONS}
_READ_ONLY = ("http", "https", "hf")


class Claim(Stored):
    """upload.json: which directory is being sent to a URL."""

    format_version: Literal[1] = 1
    """Version of this file's format."""
    manifest: str
    """SHA-256 of the manifest that comes last."""
    source: JsonObject = Field(default_factory=dict)
    """What the directory was made from: whose it is."""

    def text(self) -> str:
        """Return the content of the file."""
        return self.model_dump_json() + "\n"


class Wanted(NamedTuple):
    """A file of a directory, as its manifest describes it."""

    name: str
    size_bytes: int | None
    """Its size. None when the manifest does not have it."""
    problem: Callable[[Path], str | None]
    """Returns what is wrong with a copy of it, as a sentence that names its path, or None."""


class Altered(DataError):
    """What has arrived is not what the manifest describes."""


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
        name: str,
        sent: Description | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Send a file unless `sent` describes the same content, and check what has arrived.

        Raises: DataError when it differs from the file. It is then removed.
        """
        with contextlib.suppress(DataError):  # what cannot be read back is sent again
            if sent is not None and self._holds(path, name, sent):
                advance(path.stat().st_size)
                return
        self.put(path, name, advance)
        arrived = with_retries(
            f"{self.url}/{name}", lambda: self._filesystem.info(f"{self._path}/{name}")
        )
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


@contextlib.contextmanager
def push(
    remote: RemoteFolder, manifest: bytes, claim: Claim, found: Claim | None
) -> Iterator[dict[str, Description]]:
    """Claim a directory at a URL, let the caller send its files there, then send the manifest.

    `found` is the claim that is there. Yields what an earlier call with the same claim has sent,
    for `RemoteFolder.send`. A kill or an error leaves the claim, and no manifest.

    Raises: DataError when the server does not answer or rejects the request, or the manifest
    arrives altered.
    """
    sent = remote.files() if found == claim else {}
    if not sent:
        remote.put_text(CLAIM, claim.text())
    yield sent
    with tempfile.TemporaryDirectory(prefix="flatout-") as work:
        path = Path(work) / MANIFEST
        path.write_bytes(manifest)
        remote.send(path, MANIFEST)  # removes what has arrived altered
    if read_if_there(f"{remote.url}/{MANIFEST}") != manifest:
        remote.remove(MANIFEST)
        raise remote.altered(MANIFEST)
    remote.remove(CLAIM)


def pull(
    url: str,
    manifest: bytes,
    files: Sequence[Wanted],
    target: Path,
    *,
    fix: str,
    more_space: str,
    progress: Progress,
    open_file: Callable[[str], IO[bytes]] = open_remote,
) -> None:
    """Fetch the files of a directory that `target` lacks, several at once, then write the manifest.

    Each file is checked when it has arrived. After a kill or an error, the whole ones stay.
    `open_file` opens one by its URL. `fix` is the advice for an altered file, `more_space` that for
    a full disk.

    Raises: Altered when a file is missing or not as described; DataError when the disk is too small
            or the server fails; OSError.
    """
    target.mkdir(parents=True, exist_ok=True)
    for torn in target.glob(f"*{PART}"):
        torn.unlink()
    sizes = {file.name: file.size_bytes or 0 for file in files}
    missing = sum(size for name, size in sizes.items() if not (target / name).is_file())
    free = shutil.disk_usage(target).free
    if missing > free:
        raise DataError(
            f"Fetching {url} needs {amount(missing, 'bytes')}, "
            f"but only {amount(free, 'bytes')} are free in {target}.",
            fix=f"Free some space there, or {more_space}.",
        )

    def fetch_one(file: Wanted, advance: Advance) -> None:
        path, where = target / file.name, f"{url}/{file.name}"
        if file.problem(path) is None:
            advance(sizes[file.name])
            return
        most_bytes = math.inf if file.size_bytes is None else file.size_bytes
        try:
            with open_file(where) as source:
                receive(source, path, where, advance, most_bytes=most_bytes, fix=fix)
        except NothingThere:
            path.unlink(missing_ok=True)
        if problem := file.problem(path):
            path.unlink(missing_ok=True)
            raise Altered(problem.replace(str(target), url), fix=fix)

    jobs = [partial(fetch_one, file) for file in files]
    transfer_all(f"Fetching {url}", jobs, sum(sizes.values()), progress)
    receive(io.BytesIO(manifest), target / MANIFEST, url, fix=fix)
    sync(target)


def receive(
    source: IO[bytes],
    target: Path,
    url: str,
    advance: Advance = lambda _: None,
    *,
    most_bytes: float = math.inf,
    fix: str,
) -> None:
    """Write the content of a file from `url` to `target`.

    Raises: Altered, with `fix`, when it cannot be unpacked or has more than `most_bytes`.
    """
    with CheckedFile(target) as file:
        try:
            while block := source.read(BLOCK_BYTES):
                if file.size + len(block) > most_bytes:
                    raise Altered(
                        f"{url} is damaged: it has more than the {most_bytes:,.0f} bytes in the "
                        "manifest.",
                        fix=fix,
                    )
                file.write(np.frombuffer(block, np.uint8))
                advance(len(block))
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise Altered(f"{url} is damaged: {error}.", fix=fix) from error


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
