"""Downloads a public file, resumes partial downloads and checks the SHA-256."""

from __future__ import annotations

import os
from pathlib import Path

from flatout.errors import DataError
from flatout.progress import SILENT, Progress, Task
from flatout.storage import files
from flatout.storage.cache import ELSEWHERE
from flatout.storage.files import PART, is_full, unless_broken
from flatout.storage.remote.connection import byte_counter, open_filesystem, with_retries
from flatout.storage.remote.reading import BLOCK_BYTES, NotSeekable, RemoteFile


def download(
    url: str,
    target: Path,
    *,
    sha256: str,
    num_bytes: int | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Download a file to `target`, unless it is already there, and return `target`.

    Failed requests are retried. The bytes received so far stay in `target.part` for the next call.

    Raises: DataError when the server does not answer, or the file does not match the checksum;
            MissingPackage.
    """
    if target.is_file() and files.sha256(target) == sha256:
        return target
    part = target.with_name(target.name + PART)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress.task(
            f"Downloading {url}", total=num_bytes and num_bytes / 1e6, unit="MB"
        ) as task:
            if _complete(url, part, task) and files.sha256(part) != sha256:
                task.note("the partial file does not match its checksum; restarting the download")
                part.unlink()
                _complete(url, part, task)
        found = files.sha256(part)
        if found != sha256:
            part.unlink()
            raise DataError(
                f"{url} returned a file with SHA-256 {found}, not {sha256}.",
                fix="The file at this URL has changed: pass the original with --from FILE.",
            )
        part.replace(target)
    except OSError as error:
        own = "Free some space" if is_full(error) else "Make it writable"
        raise DataError(
            f"Cannot write {error.filename or part}: {error.strerror or error}.",
            fix=unless_broken(error, f"{own}, {ELSEWHERE}, or pass the file with --from FILE."),
        ) from error
    return target


def _complete(url: str, part: Path, task: Task) -> bool:
    """Download the rest of a file into `part`, and return whether this resumed a download."""
    try:
        try:
            with RemoteFile(url) as remote, part.open("ab") as file:
                if file.tell() > remote.seek(0, os.SEEK_END):
                    file.truncate(0)
                start = remote.seek(file.tell())
                task.advance(start / 1e6)
                while block := remote.read(BLOCK_BYTES):
                    file.write(block)
                    task.advance(len(block) / 1e6)
            return start > 0
        except NotSeekable:
            _download_at_once(url, part, task)
            return False
    except DataError as error:
        kept = part.stat().st_size if part.is_file() else 0
        more = f" The first {kept:,} bytes are kept. The next run resumes there." if kept else ""
        raise DataError(
            error.what + more,
            fix="Check the network and try again, or pass the file with --from FILE.",
        ) from error


def _download_at_once(url: str, part: Path, task: Task) -> None:
    filesystem, path = open_filesystem(url)
    counter = byte_counter(lambda received: task.advance(received / 1e6))

    def download() -> None:
        counter.absolute_update(0)
        filesystem.get_file(path, str(part), callback=counter)

    with_retries(url, download)


def check_file(path: Path, sha256: str) -> None:
    """Check a local file against the checksum of a dataset card.

    Raises: DataError when it cannot be read or does not match.
    """
    try:
        found = files.sha256(path)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.", fix="Check the path given with --from."
        ) from error
    if found != sha256:
        raise DataError(
            f"{path} has SHA-256 {found}, not {sha256}.",
            fix="Pass the original file, or prepare this one by its path, without --from.",
        )
