"""Whole directories: one with a manifest is complete, on this machine and at a URL.

Here it is written beside its name and renamed: `NAME.part-RANDOM` is being written or deleted, and
`NAME.old-RANDOM` is being replaced. A kill leaves one of them, which `sweep` deletes, or brings
back when nothing has taken its name. What sends a directory to a URL sends the manifest last, and
what fetches one keeps it in `NAME.pull` until it is complete, from where the next call continues.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, cast

from pydantic import BaseModel

from flatout.display import amount
from flatout.errors import DataError, MissingPackage
from flatout.progress import SILENT, Progress
from flatout.storage.files import BLOCK_BYTES, PART, FileEntry, lock, sha256, sync
from flatout.storage.remote.connection import NothingThere
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.parallel import Advance, transfer_all
from flatout.storage.remote.reading import open_remote, read_if_there

MANIFEST = "manifest.json"
OLD, PULL = ".old", ".pull"
RANDOM = "-" + "[0-9a-f]" * 16
"""The end of such a name, which nobody gives a directory by hand, as `model.old-2024`."""
COMPRESSED = ".zst"


class Listing(BaseModel):
    """What the manifest of every whole directory has."""

    files: list[FileEntry]
    """Every other file."""


def entry_of(path: Path) -> FileEntry:
    """Return the entry of an existing file, with its SHA-256."""
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=sha256(path))


def problem_of(path: Path, entry: FileEntry, *, deep: bool = True) -> str | None:
    """Return what is wrong with a file, judged by its size, and with `deep` by its content."""
    if not path.is_file():
        return f"{path} is missing."
    size = path.stat().st_size
    if size != entry.size_bytes:
        return f"{path} has {size} bytes, not {entry.size_bytes}."
    try:
        if deep and not _matches(path, entry):
            return f"{path} is damaged: its content does not match its checksum."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    return None


def damage_of(
    folder: Path, entries: Sequence[FileEntry], *, progress: Progress = SILENT
) -> list[str]:
    """Return what is wrong with the files of a directory, of which several are read at once."""
    found: dict[FileEntry, str | None] = {}

    def check(entry: FileEntry, advance: Advance) -> None:
        found[entry] = problem_of(folder / entry.name, entry)
        advance(entry.size_bytes)

    num_bytes = sum(entry.size_bytes for entry in entries)
    jobs = [partial(check, entry) for entry in entries]
    transfer_all(f"Reading {folder}", jobs, num_bytes, progress)
    return [problem for entry in entries if (problem := found[entry])]


def _matches(path: Path, entry: FileEntry) -> bool:
    if entry.sha256:
        return sha256(path) == entry.sha256
    with path.open("rb") as file:
        return all(zlib.crc32(file.read(BLOCK_BYTES)) == crc for crc in entry.block_crc32)


def beside(path: Path, kind: str = PART) -> Path:
    """Return a new name beside a directory, under which it does not count."""
    return path.with_name(f"{path.name}{kind}-{secrets.token_hex(8)}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new directory, which takes the name `path` when the block has succeeded.

    After an error it is deleted, and an earlier directory of that name stays as it was. It is
    locked, so that nobody else sweeps it.
    """
    path = path.absolute()
    sweep(path.parent, glob.escape(path.name))
    temporary = beside(path)
    temporary.mkdir(parents=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk without locks
            lock(descriptor)
        yield temporary
        publish(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Sync a directory and rename it to `path`. An earlier one of that name is deleted.

    Its weights get the permissions of other new files: safetensors lets only their owner read them.
    """
    with suppress(OSError):  # a linked file of somebody else, or a disk without permissions
        for weights in temporary.glob("*.safetensors"):
            weights.chmod(temporary.stat().st_mode & 0o666)
    sync(temporary)
    old = beside(path, OLD) if path.exists() else None
    if old:
        path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        if old:
            old.rename(path)
        raise
    sync(path.parent)
    if old:
        remove(old, path)


def remove(path: Path, name: Path | None = None) -> bool:
    """Delete a directory, and return whether it no longer counts as one.

    It is renamed first: a kill never leaves half of it under its name. What the system keeps, as
    files that a process reads on a network disk, is left to `sweep`.
    """
    gone = beside(name or path)
    try:
        path.rename(gone)
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def sweep(parent: Path, pattern: str) -> list[str]:
    """Delete what killed processes have left of the directories of these names, and return it.

    A directory that was being replaced gets its name back if that is free.
    """
    left = [one for one in sorted(parent.glob(f"{pattern}{PART}*{RANDOM}")) if not _in_use(one)]
    for old in sorted(parent.glob(f"{pattern}{OLD}{RANDOM}")):
        path = old.with_name(old.name.rpartition(OLD)[0])
        if path.exists():
            left.append(old)
        else:
            old.rename(path)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)  # another process may delete it too
    return [path.name for path in left if not path.exists()]


def _in_use(path: Path) -> bool:
    """Return whether a process is writing a directory."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            lock(descriptor)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


class Altered(DataError):
    """What is at a URL is not what its manifest describes."""


def name_of(name: str, manifest: bytes) -> str:
    """Return the name of a directory at a URL, where nothing of that name is ever replaced."""
    return f"{name}-{hashlib.sha256(manifest).hexdigest()[:8]}"


def push(
    folder: Path,
    url: str,
    names: Collection[str],
    *,
    packed_in: Path | None = None,
    before_manifest: Callable[[], object] = lambda: None,
    moved: Advance = lambda _: None,
    progress: Progress = SILENT,
) -> int:
    """Send the named files of a directory to a URL, then its manifest, and return the bytes.

    What an earlier call has sent is not sent again. With `packed_in`, a directory for temporary
    files, they are compressed. `moved` learns of bytes that were sent.

    Raises: DataError when the server does not answer, rejects the request or alters a file.
    """
    remote, sizes = RemoteFolder(url), list[int]()
    sent = remote.files()

    def send(name: str, advance: Advance) -> None:
        def count(num_bytes: int) -> None:
            moved(num_bytes)
            advance(num_bytes)

        path = folder / name
        if packed_in is not None:
            path = _packed(path, packed_in / f"{name}{COMPRESSED}")
        remote.send(path, path.name, sent.get(path.name), count)
        sizes.append(path.stat().st_size)
        if packed_in is not None:
            path.unlink()

    jobs = [partial(send, name) for name in sorted(names)]
    total = sum((folder / name).stat().st_size for name in names)
    transfer_all(f"Sending {url}", jobs, total, progress)
    before_manifest()
    remote.send(folder / MANIFEST, MANIFEST)
    if read_if_there(f"{url}/{MANIFEST}") != (folder / MANIFEST).read_bytes():
        remote.remove(MANIFEST)  # a store without checksums altered it
        raise remote.altered(MANIFEST)
    return sum(sizes)


def pull(
    url: str,
    target: Path,
    manifest: bytes,
    files: Sequence[FileEntry],
    *,
    fix: str,
    progress: Progress = SILENT,
) -> None:
    """Fetch the files that a manifest lists, check them, and give the directory its name.

    Several are fetched at once. After a kill or an error, the next call continues with those that
    are missing. `fix` is the advice for a file that is not as listed.

    Raises: Altered when one is not; NothingThere when one is missing; DataError when the disk is
            too small or the server fails; OSError.
    """
    part = target.with_name(target.name + PULL)
    part.mkdir(parents=True, exist_ok=True)
    sizes = {entry.name: entry.size_bytes for entry in files}
    for path in part.iterdir():
        if path.name not in sizes:
            path.unlink()  # of an earlier version, or torn
    missing = sum(size for name, size in sizes.items() if not (part / name).exists())
    free = shutil.disk_usage(part).free
    if missing > free:
        raise DataError(
            f"Fetching {url} needs {amount(missing, 'bytes')}, "
            f"but only {amount(free, 'bytes')} are free in {part.parent}.",
            fix="Free some space there, or choose a directory on a larger disk.",
        )

    jobs = [
        partial(fetch_checked, f"{url}/{entry.name}", part / entry.name, entry, fix=fix)
        for entry in files
    ]
    transfer_all(f"Fetching {url}", jobs, sum(sizes.values()), progress)
    (part / MANIFEST).write_bytes(manifest)
    sync(part / MANIFEST)
    publish(part, target)


def fetch_checked(url: str, target: Path, entry: FileEntry, advance: Advance, *, fix: str) -> None:
    """Write a file at a URL to `target`, unless it is there, and check it against its entry.

    Raises: Altered when it is not as listed; NothingThere; DataError; OSError.
    """
    if problem_of(target, entry) is None:
        advance(entry.size_bytes)
        return
    target.unlink(missing_ok=True)
    fetch(url, target, advance, most_bytes=entry.size_bytes, fix=fix)
    if problem := problem_of(target, entry):
        target.unlink()
        raise Altered(problem.replace(str(target), url), fix=fix)


def fetch(
    url: str,
    target: Path,
    advance: Advance = lambda _: None,
    *,
    most_bytes: float = math.inf,
    fix: str,
) -> None:
    """Write the content of a file at a URL, which may be compressed there, to `target`.

    Raises: Altered when it cannot be unpacked or has more than `most_bytes`; NothingThere; OSError.
    """
    part = target.with_name(target.name + PART)
    with open_packed(url) as source, part.open("wb") as file:
        try:
            while block := source.read(BLOCK_BYTES):
                if file.tell() + len(block) > most_bytes:
                    what = f"has more than the {most_bytes:,.0f} bytes in the manifest"
                    raise Altered(f"{url} is damaged: it {what}.", fix=fix)
                file.write(block)
                advance(len(block))
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise Altered(f"{url} is damaged: {error}.", fix=fix) from error
    sync(part)
    part.replace(target)


def open_packed(url: str) -> IO[bytes]:
    """Open a file at a URL that may have been compressed when it was sent.

    Raises: NothingThere; MissingPackage; DataError.
    """
    try:
        return open_remote(url)
    except NothingThere as error:
        try:
            file = open_remote(f"{url}{COMPRESSED}")
        except NothingThere:
            raise error from None
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackage(
            f"Reading {url}{COMPRESSED} needs the package zstandard, which is not installed.",
            fix='Install it: `pip install "flatout[zstd]"`.',
        ) from error
    return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(file))


def _packed(path: Path, target: Path) -> Path:
    import zstandard

    with path.open("rb") as source, target.open("wb") as file:
        zstandard.ZstdCompressor().copy_stream(source, file, size=path.stat().st_size)
    return target
