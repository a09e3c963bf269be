"""Downloads a public file and checks its SHA-256."""

from __future__ import annotations

from pathlib import Path

from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.storage import files
from flatout.storage.cache import ELSEWHERE
from flatout.storage.files import PART, is_full, unless_broken
from flatout.storage.remote.connection import byte_counter, open_filesystem, with_retries


def download(
    url: str,
    target: Path,
    *,
    sha256: str,
    num_bytes: int | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Download a file to `target`, unless it is already there, and return `target`.

    Raises: DataError when the server does not answer, or the file does not match the checksum;
            MissingPackage.
    """
    if target.is_file() and files.sha256(target) == sha256:
        return target
    part = target.with_name(target.name + PART)
    filesystem, path = open_filesystem(url)
    total = num_bytes and num_bytes / 1e6
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress.task(f"Downloading {url}", total=total, unit="MB") as task:
            counter = byte_counter(lambda received: task.advance(received / 1e6))

            def get() -> None:
                counter.absolute_update(0)
                filesystem.get_file(path, str(part), callback=counter)

            with_retries(url, get)
        found = files.sha256(part)
        if found == sha256:
            return part.replace(target)
    except DataError as error:
        raise DataError(
            error.what, fix="Check the network and try again, or pass the file with --from FILE."
        ) from error
    except OSError as error:
        own = "Free some space" if is_full(error) else "Make it writable"
        raise DataError(
            f"Cannot write {error.filename or part}: {error.strerror or error}.",
            fix=unless_broken(error, f"{own}, {ELSEWHERE}, or pass the file with --from FILE."),
        ) from error
    part.unlink()
    raise DataError(
        f"{url} returned a file with SHA-256 {found}, not {sha256}.",
        fix="The file at this URL has changed: pass the original with --from FILE.",
    )


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
