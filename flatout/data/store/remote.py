"""Fetches a dataset at a URL such as s3://bucket/data once into the cache, and checks every block.

The cache keeps a URL's files in its directory `stored/NAME-DIGEST/`: one copy for each version of
the dataset that was read, named by its manifest's digest. A copy with a manifest is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flatout.data.store.integrity import file_problem, file_problems
from flatout.data.store.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, in_shell, without_secrets
from flatout.progress import SILENT, Progress
from flatout.storage.cache import ELSEWHERE, VARIABLE, default_cache
from flatout.storage.files import expanded, is_full, lock, unless_broken
from flatout.storage.remote.connection import ATTEMPTS, Unreachable
from flatout.storage.remote.folder import Wanted, pull
from flatout.storage.remote.reading import read_if_there
from flatout.storage.remote.urls import is_url, protocol_of

ATTEMPTS_WITH_COPY = 1
"""Attempts to reach a store when a copy can be read instead. Client packages also retry."""


def open_dataset(
    path_or_url: str | Path, *, cache: Path | None = None, progress: Progress = SILENT
) -> Dataset:
    """Open a dataset in a directory or at a URL. A remote dataset is fetched unless it is cached.

    `cache` is the directory of copies. None means the user's cache.

    Raises: DataError when there is none, it is incomplete, or it cannot be fetched; MissingPackage.
    """
    if not is_url(str(path_or_url)):
        return Dataset.open(path_or_url)
    url = dataset_url(str(path_or_url))
    copy = fetch_dataset(url, cache=cache or default_cache(), progress=progress)
    return Dataset.open(copy, origin=url)


def absolute_path_or_url(path_or_url: str) -> str:
    """Return a URL unchanged, and a path as an absolute path."""
    return path_or_url if is_url(path_or_url) else str(expanded(path_or_url).absolute())


def dataset_url(url: str) -> str:
    """Return the URL of a dataset without a trailing slash.

    Raises: DataError when it names a local directory, or contains a secret, which would be stored
            in configurations and manifests.
    """
    if protocol_of(url) in ("file", "local"):
        raise DataError(
            f"{url} is a directory on this machine.", fix="Give its path, without file://."
        )
    if without_secrets(url) != url:
        raise DataError(
            f"{url}: the URL of a dataset must not contain a user, a password or a query.",
            fix="Give credentials as the store expects them: "
            "environment variables, a profile or a login.",
        )
    bare = url.rstrip("/")
    if not is_url(bare) or bare.endswith("://"):
        raise DataError(
            f"{url} does not name a directory in a store.", fix="Write it as s3://BUCKET/DIRECTORY."
        )
    return bare


def cache_dir_of(url: str, cache: Path) -> Path:
    """Return the cache directory for a URL."""
    name = url.rpartition("/")[2][-64:]
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return cache.expanduser() / "stored" / f"{name}-{digest}"


def copy_dir_of(cache_dir: Path, manifest: bytes) -> Path:
    """Return the cache directory for the version of the dataset that has this manifest."""
    return cache_dir / hashlib.sha256(manifest).hexdigest()[:16]


@contextlib.contextmanager
def locked(cache_dir: Path, when_taken: Callable[[], None]) -> Iterator[None]:
    """Create and lock a URL's cache directory. Call `when_taken`, which may raise, before waiting.

    Raises: DataError when the cache cannot be written.
    """
    with explaining_cache_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cache_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        with explaining_cache_errors(cache_dir):
            try:
                lock(descriptor)
            except BlockingIOError:
                when_taken()
                lock(descriptor, wait_s=math.inf)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explaining_cache_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the path."""
    try:
        yield
    except OSError as error:
        fix = f"Make it writable, or {ELSEWHERE}."
        if is_full(error):
            fix = (
                "Free some space and run the same command again: finished work is kept. Or "
                f"{ELSEWHERE}."
            )
        raise DataError(
            f"Cannot write {path}: {error.strerror or error}.", fix=unless_broken(error, fix)
        ) from error


def fetch_dataset(url: str, *, cache: Path, progress: Progress = SILENT) -> Path:
    """Return a local copy of the dataset's current version. One process at a time fetches it.

    When the store cannot be reached, report it and return the copy that was read last.

    Raises: DataError when there is no dataset, no space, or no connection; MissingPackage.
    """
    cache_dir = cache_dir_of(url, cache)
    last = _last_read(cache_dir)
    try:
        content, manifest = remote_manifest(
            url, attempts=ATTEMPTS if last is None else ATTEMPTS_WITH_COPY
        )
    except Unreachable as error:
        if last is None:
            raise
        progress.say(f"{error.what} Reading the copy in {last}.")
        return last
    copy = copy_dir_of(cache_dir, content)
    waiting = f"Another process is fetching or preparing {url}. Waiting for it."
    if not _is_complete(copy, manifest):
        with locked(cache_dir, lambda: progress.say(waiting)):
            if not _is_complete(copy, manifest):
                if last is not None and last != copy:
                    progress.say(
                        f"{url} has changed. The earlier version stays in {last}. "
                        "Remove it when no run uses it."
                    )
                _fetch(url, copy, manifest, content, progress)
    with contextlib.suppress(OSError):  # the cache may belong to another user
        os.utime(copy)
    return copy


def remote_manifest(url: str, *, attempts: int = ATTEMPTS) -> tuple[bytes, Manifest]:
    """Return the manifest at a URL, as its bytes and parsed.

    Raises: DataError when there is none, it cannot be read, or the store does not answer.
    """
    content = read_if_there(f"{url}/{MANIFEST}", attempts=attempts)
    if content is None:
        raise DataError(
            f"There is no dataset at {url}: it has no {MANIFEST}.",
            fix=f"Check the URL, or prepare a dataset with `flatout prepare SOURCE "
            f"--out {in_shell(url)}`.",
        )
    return content, parse_manifest(content.decode("utf-8", errors="replace"), f"{url}/{MANIFEST}")


def _last_read(cache_dir: Path) -> Path | None:
    copies = sorted(
        (path.parent for path in cache_dir.glob(f"*/{MANIFEST}")),
        key=lambda copy: copy.stat().st_mtime,
        reverse=True,
    )
    for copy in copies:
        with contextlib.suppress(DataError):
            if _is_complete(copy, read_manifest(copy)):
                return copy
    return None


def _is_complete(copy: Path, manifest: Manifest) -> bool:
    return (copy / MANIFEST).is_file() and next(file_problems(copy, manifest), None) is None


def _fetch(url: str, copy: Path, manifest: Manifest, content: bytes, progress: Progress) -> None:
    """Fetch the files that the copy lacks, several at once, then write the manifest."""
    files = [
        Wanted(entry.name, entry.size_bytes, partial(file_problem, entry=entry))
        for entry in manifest.files
    ]
    with explaining_cache_errors(copy):
        pull(
            url,
            content,
            files,
            copy,
            fix=_verify_fix(url),
            more_space="name a directory on a larger disk with data.cache, "
            f"or with the environment variable {VARIABLE} for every command",
            progress=progress,
        )


def _verify_fix(url: str) -> str:
    return (
        f"Check the whole dataset with `flatout verify {in_shell(url)}`, "
        "and prepare it again at a different URL."
    )
