"""Files that are whole or absent: durable writes, checksums, JSON, lines, links; and what a disk
says when it refuses.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flatout.errors import CheckpointError, DataError, RunFailed, in_shell
from flatout.recognised import open_regular, read_regular, require_local

BLOCK_BYTES = 4 * 1024 * 1024
"""Every block of this size, the last one of a file shorter, has a CRC-32 of its own."""

Array = np.ndarray[Any, np.dtype[Any]]

PART = ".part"
"""What the name of a file ends in until it is whole."""
BROKEN = "That disk has failed to read or write (the system's log, `dmesg`, says more): check it, or use another; then run the same command again."
"""What to do about a disk that answers with EIO."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Document = TypeVar("Document", bound=BaseModel)

DISK_REFUSES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
}
"""What the system says when a disk does not take a file."""
RESTORE = "Restore it from a copy, or use another checkpoint or run."
"""What to do about a damaged file."""


class FileEntry(BaseModel):
    """One flat binary file of the folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """File name inside the folder."""
    size_bytes: int = Field(ge=0)
    """Exact size."""
    block_crc32: tuple[int, ...]
    """CRC-32 of each 4 MiB block, in order."""


class LocksUnsupported(OSError):
    """The file system has no locks."""


class Unfinished(DataError):
    """Stopped half way by something other than the text: what is done stays, and the same command
    goes on from there.
    """


class CheckedFile:
    """A file being written under a temporary name, with a CRC-32 for every 4 MiB block; `close`
    gives it its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = _temporary(path)
        self._file = self._temporary.open("wb", buffering=1 << 20)
        self._crc = 0
        self._crcs: list[int] = []
        self._entry: FileEntry | None = None
        self.size = 0

    def write(self, items: Array) -> None:
        """Append the array's bytes."""
        data = np.ascontiguousarray(items).data.cast("B") if items.size else memoryview(b"")
        self._file.write(data)
        while data:
            piece = data[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._crc = zlib.crc32(piece, self._crc)
            self.size += len(piece)
            data = data[len(piece) :]
            if self.size % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0

    def close(self) -> FileEntry:
        """Sync, rename, and return the entry; the second time only return it."""
        if self._entry is None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
            crcs = self._crcs + [self._crc] * (self.size % BLOCK_BYTES != 0)
            self._entry = FileEntry(
                name=self.path.name, size_bytes=self.size, block_crc32=tuple(crcs)
            )
        return self._entry

    def abandon(self) -> None:
        """Remove what is not closed, whatever the disk says."""
        if self._entry is None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()


def write_whole(path: Path, text: str) -> None:
    """Put `text` in `path` so that a reader, a kill or a power cut at any moment finds what was
    there before or all of it, never a part.

    After a power cut it may be what was there before, until the folder is synced.
    """
    _put(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole; when this returns, a power cut leaves it there."""
    write_whole(path, text)
    sync(path.parent)


def copy_whole(source: Path, path: Path) -> None:
    """Put a copy of a small file in `path`, whole or not at all."""
    _put(path, lambda temporary: shutil.copyfile(source, temporary))


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written under a temporary name, and give it its own; where the disk refuses, the
    temporary one goes again.
    """
    temporary = _temporary(path)
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_first(path: Path, write: Callable[[Path], object]) -> None:
    """Have a small file written whole, unless it is there: of several processes that do this at
    once, one does.
    """
    temporary = _temporary(path)
    write(temporary)
    sync(temporary)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PART}")


def check_blocks(path: Path, entry: FileEntry) -> bool:
    """Return whether a file has the size and the checksums of its entry."""
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    with path.open("rb") as file:
        return all(zlib.crc32(file.read(BLOCK_BYTES)) == crc for crc in entry.block_crc32)


def entry_of(path: Path) -> FileEntry:
    """Return the entry of a file that is there."""
    with path.open("rb") as file:
        crcs = tuple(zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b""))
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, block_crc32=crcs)


@contextlib.contextmanager
def writing(out: Path | str) -> Iterator[None]:
    """Turn what the disk refuses into a DataError that names the folder; what is done is kept where
    the disk is full or fails.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL or error.errno == errno.EIO:
            fix = unless_broken(
                error, "Make room there and run the same command again: it keeps what is done."
            )
            raise Unfinished(f"Cannot write {out}: {reason}.", fix=fix) from error
        raise DataError(
            f"Cannot write {out}: {reason}.",
            fix="Choose a folder you may write to, on a disk with room, with --out.",
        ) from error


def unless_broken(error: OSError, fix: str) -> str:
    """Return what to do when a disk refuses: `fix`, but for one that fails, which is not full."""
    return BROKEN if error.errno == errno.EIO else fix


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, shared: bool = False, wait_s: float = 0.0) -> None:
    """Lock an open file or folder until its descriptor is closed, at the latest when the process
    ends.

    An exclusive lock excludes all others; shared locks exclude only exclusive ones. A shared lock
    becomes an exclusive one when the same descriptor is locked again. `wait_s` may be `math.inf`.
    Raises: BlockingIOError when another process still holds the lock after `wait_s` seconds;
            LocksUnsupported; OSError.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind if wait_s == math.inf else kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(0.05)
        except OSError as error:
            if error.errno in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                raise LocksUnsupported(*error.args) from error
            raise


def is_open_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the open file or folder.

    A process that waited for a lock may hold it on a file that its owner has deleted.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def expanded(path: Path | str) -> Path:
    """Return the path with the home folder that `~` at its beginning stands for.

    Raises: DataError when there is no such folder, or it is an address.
    """
    require_local(path, error=DataError)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path}: no home folder is known for {Path(path).parts[0]!r}.",
            fix="Write the path out, from / on.",
        ) from error


def write_json(path: Path, document: Any) -> None:
    """Write `document` as JSON, whole or not at all. Floats come back equal in every bit."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Return the JSON document in `path`.

    Raises: CheckpointError naming the file when it is missing or is not JSON.
    """
    try:
        return json.loads(read_regular(path))
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.", fix=RESTORE) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON.", fix=RESTORE) from error


def read_model(path: Path, model: type[Document], *, fix: str = RESTORE) -> Document:
    """Return the JSON document in `path` as a `model`; nothing is converted, and keys it does not
    know are left out.

    Raises: CheckpointError naming the file and the key when it is missing, is not JSON, or is not
            such a document.
    """
    try:
        return model.model_validate(read_json(path), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} is damaged: {f'{key}: ' if key else ''}{first['msg']}.", fix=fix
        ) from error


@contextmanager
def writing_run(folder: Path) -> Iterator[None]:
    """Name the run directory when the disk refuses one of its small files.

    Raises: RunFailed with what to do about it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_REFUSES:
            raise
        raise RunFailed(
            f"Cannot write {error.filename or folder}: {error.strerror or error}.",
            fix=way_out(error),
        ) from error


def way_out(error: Exception) -> str:
    """Return what to do when a disk refuses to read or write; safetensors and torch tell the
    system's number in their text alone.
    """
    told = re.search(r"(?:os error |\()(\d+)\)", str(error))
    number = int(told[1]) if told else getattr(error, "errno", None)
    if number == errno.EIO:
        return "That disk has failed to read or write (the system's log, `dmesg`, says more): check it, or copy the run directory to another disk."
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "Make that place writable, then run the same command again; or choose another folder with --run-dir DIR."
    if number in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}:
        return "Keep the run directory where it is while the run trains, the same one for all its processes; then run the same command again."
    if number == errno.ENAMETOOLONG:
        return "Choose a shorter path with --run-dir DIR."
    return "Free space on that disk, then run the same command again."


@contextmanager
def understanding(path: Path) -> Iterator[None]:
    """Name `path` when what was read from it lacks a key, or has a value of another kind or nesting
    than was written.

    Raises: CheckpointError.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}.", fix=RESTORE
        ) from error


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run directory and return its descriptor; a link is not followed, and a pipe
    is not waited for.

    Raises: CheckpointError when it is a link, not a regular file, or to be written while it has a
            second hard link; OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK}:  # the second is FreeBSD's
            raise _is_a_link(path) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{path} is not a regular file.",
            fix=f"Delete {path}, or choose another folder with --run-dir DIR.",
        )
    if found.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
        os.close(descriptor)
        copy = path.with_name(f"{path.name}.copy")
        raise CheckpointError(
            f"{path} has another hard link: what a run writes to it would change the other file too.",
            fix=f"Replace it with a copy, `cp {in_shell(path)} {in_shell(copy)} && mv {in_shell(copy)} {in_shell(path)}`, "
            "or choose another folder with --run-dir DIR.",
        )
    return descriptor


def refuse_links(paths: Iterable[Path]) -> None:
    """Check that no path is a symbolic link: what a run writes stays in its directory.

    Raises: CheckpointError naming the first link.
    """
    for path in paths:
        if path.is_symlink():
            raise _is_a_link(path)


def _is_a_link(path: Path) -> CheckpointError:
    target = os.readlink(path) if path.is_symlink() else "another file"
    fix = f"Replace {path} with what it points to, or delete it; checkpoint.dir=DIR keeps the checkpoints of a new run on another disk."
    return CheckpointError(
        f"{path} is a symbolic link to {target}: a run does not write through links.", fix=fix
    )


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Add one JSON line to `path`. A line that a kill left unfinished is closed first, so that it
    spoils no other.
    """
    line = json.dumps(document).encode() + b"\n"
    with os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            line = b"\n" + line
        file.write(line)


def read_lines(path: Path, *, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of `path` (only those that begin in its last `tail_bytes`); an
    unfinished line is left out.

    Raises: CheckpointError when it cannot be read.
    """
    if not path.exists():
        return
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.", fix=RESTORE) from error
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = 0 if tail_bytes is None else max(size - tail_bytes, 0)
        file.seek(start)
        if start:
            file.readline()
        for line in file:
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict):
                yield document


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under `folder`; what disappears meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
