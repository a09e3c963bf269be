"""A data set at an address such as s3://bucket/data: fetched once into the cache, every block
checked, then read as any folder is.

What is read of one address on this machine lies in its home,
`~/.cache/flatout/stored/NAME-DIGEST/`: a copy for each state of the data set that was read, named
by its manifest's digest. A copy that has a manifest is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from flatout.data.prepare.inputs import CACHE
from flatout.data.prepare.limits import in_words
from flatout.data.store.integrity import file_problems
from flatout.data.store.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    parse_manifest,
    read_manifest,
)
from flatout.data.store.shards import Dataset
from flatout.data.store.transfers import Transfers
from flatout.errors import DataError, in_shell, without_secrets
from flatout.files import PART, CheckedFile, expanded, unless_broken
from flatout.progress import SILENT, Progress
from flatout.sources.remote import (
    ATTEMPTS,
    NothingThere,
    Unreachable,
    is_address,
    open_remote,
    protocol_of,
    read_remote,
)

_MAKE_ROOM = "Make room there and run the same command again: it keeps what is done."
ATTEMPTS_WITH_COPY = 1
"""So often a store is asked where a copy can be read when it does not answer; the packages that ask
try again by themselves.
"""


def open_place(place: str | Path, *, cache: Path = CACHE, progress: Progress = SILENT) -> Dataset:
    """Open a data set: a folder, or what lies at an address, which is fetched unless it is in the
    cache.

    Raises: DataError when there is none, it is not whole, or it cannot be fetched; MissingPackage.
    """
    if not is_address(str(place)):
        return Dataset.open(place)
    address = stored_address(str(place))
    return Dataset.open(local_copy(address, cache=cache, progress=progress), place=address)


def absolute_place(place: str) -> str:
    """Return an address as it is, and a path from the root on."""
    return place if is_address(place) else str(expanded(place).absolute())


def stored_address(address: str) -> str:
    """Return the address of a data set without a slash at its end.

    Raises: DataError when it is a folder here, or holds a secret, which configurations and
            manifests would keep.
    """
    if protocol_of(address) in ("file", "local"):
        raise DataError(
            f"{address} is a folder of this machine.", fix="Give its path, without file://."
        )
    if without_secrets(address) != address:
        raise DataError(
            f"{address}: the address of a data set may hold no user, no password and no query.",
            fix="Give credentials as its kind of store takes them: by the environment, a profile or a login.",
        )
    place = address.rstrip("/")
    if not is_address(place) or place.endswith("://"):
        raise DataError(
            f"{address} names no place in a store.", fix="Write it as s3://BUCKET/FOLDER."
        )
    return place


def home_of(address: str, cache: Path) -> Path:
    """Return the folder for all that is kept of an address."""
    name = address.rpartition("/")[2][-64:]
    return (
        cache.expanduser()
        / "stored"
        / f"{name}-{hashlib.sha256(address.encode()).hexdigest()[:16]}"
    )


def copy_of(home: Path, manifest: bytes) -> Path:
    """Return the folder for the data set that has this manifest."""
    return home / hashlib.sha256(manifest).hexdigest()[:16]


@contextlib.contextmanager
def owned(home: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Make the home of an address and own it; `busy` is called when another process does, and what
    it does not refuse waits.

    Raises: DataError when the cache cannot be written.
    """
    with in_cache(home):
        home.mkdir(parents=True, exist_ok=True)
        lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        with in_cache(home):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy()
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def in_cache(place: Path) -> Iterator[None]:
    """Turn what the disk refuses into a DataError that names the place."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"Cannot write {place}: {error.strerror or error}.",
            fix=unless_broken(error, _MAKE_ROOM),
        ) from error


def local_copy(address: str, *, cache: Path = CACHE, progress: Progress = SILENT) -> Path:
    """Return a folder that holds the data set as it is at the address now; of processes that ask at
    once, one fetches it.

    Where the store cannot be reached, that is the copy that was read last, and said.

    Raises: DataError when there is no data set, no room, or no way to it; MissingPackage.
    """
    home = home_of(address, cache)
    held = _last_read(home)
    try:
        written, manifest = stored_manifest(
            address, attempts=ATTEMPTS if held is None else ATTEMPTS_WITH_COPY
        )
    except Unreachable as error:
        if held is None:
            raise
        progress.say(f"{error.what} The copy of it in {held} is read.")
        return held
    copy = copy_of(home, written)
    if not _is_whole(copy, manifest):
        with owned(
            home,
            lambda: progress.say(
                f"Another process is fetching or preparing {address}; waiting for it."
            ),
        ):
            if not _is_whole(copy, manifest):
                if held is not None and held != copy:
                    progress.say(
                        f"{address} has changed. What it was before stays in {held}; remove it when no run reads it."
                    )
                _fetch(address, copy, manifest, written, progress)
    with contextlib.suppress(OSError):  # a cache that others own may be read
        os.utime(copy)
    return copy


def manifest_at(address: str, *, attempts: int = ATTEMPTS) -> bytes | None:
    """Return the manifest at an address as it is written there; None when there is none.

    Raises: Unreachable when the store does not answer; DataError when it refuses; MissingPackage.
    """
    try:
        return read_remote(f"{address}/{MANIFEST}", attempts=attempts)
    except NothingThere:
        return None


def stored_manifest(address: str, *, attempts: int = ATTEMPTS) -> tuple[bytes, Manifest]:
    """Return the manifest at an address, as it is written there and as what it says.

    Raises: DataError when there is none, it cannot be read, or the store does not answer.
    """
    written = manifest_at(address, attempts=attempts)
    if written is None:
        raise DataError(
            f"There is no data set at {address}: it has no {MANIFEST}.",
            fix=f"Prepare one with `flatout prepare SOURCE --out {in_shell(address)}`, or check the address.",
        )
    return written, parse_manifest(
        written.decode("utf-8", errors="replace"), f"{address}/{MANIFEST}"
    )


def _last_read(home: Path) -> Path | None:
    copies = sorted(
        (path.parent for path in home.glob(f"*/{MANIFEST}")),
        key=lambda copy: copy.stat().st_mtime,
        reverse=True,
    )
    for copy in copies:
        with contextlib.suppress(DataError):
            if _is_whole(copy, read_manifest(copy)):
                return copy
    return None


def _is_whole(copy: Path, manifest: Manifest) -> bool:
    return (copy / MANIFEST).is_file() and next(file_problems(copy, manifest), None) is None


def _fetch(
    address: str, copy: Path, manifest: Manifest, written: bytes, progress: Progress
) -> None:
    """Fetch the files that are not there yet, several at once, the manifest last."""
    with in_cache(copy):
        copy.mkdir(parents=True, exist_ok=True)
        for torn in copy.glob(f"*{PART}"):
            torn.unlink()
        missing = [entry for entry in manifest.files if not _is_there(copy / entry.name, entry)]
        size = sum(entry.size_bytes for entry in missing)
        free = shutil.disk_usage(copy).free
        if size > free:
            raise DataError(
                f"Fetching {address} takes {in_words(size)}, and {in_words(free)} are free in {copy}.",
                fix="Make room there, or make ~/.cache/flatout a link to a folder on a larger disk.",
            )
        with progress.task(f"Fetching {address}", total=size / 1e6, unit="MB") as task:
            transfers = Transfers(task)
            transfers.run(
                [
                    partial(_fetch_file, address, entry, copy / entry.name, transfers)
                    for entry in missing
                ]
            )
            _write(copy / manifest.tokenizer.file, stored_tokenizer(address, manifest))
            _write(copy / MANIFEST, written)


def _write(path: Path, data: bytes) -> None:
    file = CheckedFile(path)
    try:
        file.write(np.frombuffer(data, np.uint8))
        file.close()
    finally:
        file.abandon()


def stored_tokenizer(address: str, manifest: Manifest) -> bytes:
    """Return the tokenizer at an address.

    Raises: DataError when it cannot be read, or is not the one that made the tokens.
    """
    place = f"{address}/{manifest.tokenizer.file}"
    tokenizer = read_remote(place)
    if hashlib.sha256(tokenizer).hexdigest() != manifest.tokenizer.digest:
        raise DataError(
            f"{place} is not the tokenizer that made these tokens.", fix=_damaged(address)
        )
    return tokenizer


def _damaged(address: str) -> str:
    return f"Look at all of it with `flatout verify {in_shell(address)}`, and prepare it again at another address."


def _is_there(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size_bytes


def _fetch_file(address: str, entry: FileEntry, target: Path, transfers: Transfers) -> None:
    file = CheckedFile(target)
    try:
        for block, problem in stored_blocks(address, entry):
            if problem:
                raise DataError(problem, fix=_damaged(address))
            file.write(np.frombuffer(block, np.uint8))
            transfers.advance(len(block))
        file.close()
    finally:
        file.abandon()


def stored_blocks(address: str, entry: FileEntry) -> Iterator[tuple[bytes, str | None]]:
    """Yield the blocks of one of a data set's files, as the store gives them, each with what is
    wrong with it, if anything.

    Raises: DataError when the file cannot be read.
    """
    place = f"{address}/{entry.name}"
    try:
        file = open_remote(place)
    except NothingThere:
        yield b"", f"{place} is missing; the manifest says {entry.size_bytes} bytes."
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        if size != entry.size_bytes:
            yield b"", f"{place} has {size} bytes; the manifest says {entry.size_bytes} bytes."
            return
        file.seek(0)
        for number, crc in enumerate(entry.block_crc32):
            block = file.read(BLOCK_BYTES)
            whole = zlib.crc32(block) == crc
            yield (
                block,
                None
                if whole
                else f"{place}, byte {number * BLOCK_BYTES}: the block of {len(block)} bytes from there fails its checksum.",
            )
