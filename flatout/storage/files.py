"""Durable writes, checksums, locks, links, and the errors of failed writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import resource
import shutil
import stat
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from flatout.errors import CheckpointError, DataError, RunFailed, UsageError, in_shell
from flatout.storage.recognised import open_regular, require_local

BLOCK_BYTES = 4 * 1024 * 1024
"""Each block of this size has its own CRC-32. The last block of a file may be shorter."""

Array = np.ndarray[Any, np.dtype[Any]]

PART = ".part"
"""Suffix of a file that is not complete yet."""
BROKEN = (
    "The disk failed to read or write (see `dmesg`): check it, or use a different one. "
    "Then run the same command again."
)
"""The fix for EIO."""
TOO_LARGE = "A file may not be that large here: raise `ulimit -f`, or use a different file system."
_IN_USE = "Another process uses files there: end it. Then run the same command again."
_UNABLE = (
    "The file system there lacks this operation. Use a directory on a local disk, or on one of "
    "another kind."
)
_FIXES = {
    errno.EIO: BROKEN,
    errno.EFBIG: TOO_LARGE,
    **dict.fromkeys((errno.EBUSY, errno.ENOTEMPTY, errno.ETXTBSY), _IN_USE),
    **dict.fromkeys((errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL), _UNABLE),
}
"""What to do about errors that have one cause, whatever was written."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_OF_DISKS = (BlockingIOError, ChildProcessError, ConnectionError, TimeoutError)
"""Errors of locks, processes and sockets, which are OSErrors too."""
_LACKING = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}
"""What file systems answer that cannot sync a directory or link a file, as some network ones."""


class Stored(BaseModel):
    """Base class of frozen values that are written as JSON. Unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, protected_namespaces=()
    )


class FileEntry(Stored):
    """The size and the checksum of one file, as a manifest lists them."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """File name inside the directory."""
    size_bytes: int = Field(ge=0)
    """Exact size."""
    block_crc32: tuple[int, ...] = ()
    """CRC-32 of each 4 MiB block, in order, for a file that is read in parts."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the content of any other file."""

    @model_serializer(mode="wrap")
    def _stated(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        left_out = "block_crc32" if self.sha256 else "sha256"
        return {key: value for key, value in dump(self).items() if key != left_out}


class LocksUnsupported(OSError):
    """The file system has no locks."""


class Unfinished(DataError):
    """Work stopped, but not because of its input: parts that are finished stay valid."""


class CheckedFile:
    """A binary file written under a temporary name, with a CRC-32 per 4 MiB block.

    `close` renames it to `path`. As a context manager, it is closed, or abandoned after an error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = _temporary(path)
        self._file = self._temporary.open("wb", buffering=1 << 20)
        self._crc = 0
        self._crcs: list[int] = []
        self._entry: FileEntry | None = None
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()

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
        """Sync and rename the file, and return its entry. Further calls only return the entry."""
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
        """Delete the file unless it is closed, ignoring errors of the disk."""
        if self._entry is None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace the content of `path` with `text` atomically.

    After a kill or a power cut, `path` contains either the old content or the new, never a mixture.
    The new content is guaranteed to survive a power cut only after the directory is synced. `mode`
    is the permissions of a new file, before the umask is applied.
    """

    def write(temporary: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)

    _replace(path, write)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace the content of `path` with `text`, atomically and durably."""
    write_whole(path, text, mode=mode)
    sync(path.parent)


def copy_whole(source: Path, path: Path) -> None:
    """Replace the content of `path` with that of `source` atomically."""
    _replace(path, lambda temporary: shutil.copyfile(source, temporary))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, then sync that file and rename it to `path`."""
    temporary = _temporary(path)
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_first(path: Path, write: Callable[[Path], object]) -> None:
    """Create `path` atomically unless it exists. If several processes try, exactly one succeeds."""
    temporary = _temporary(path)
    write(temporary)
    sync(temporary)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was first
    except OSError as error:
        if error.errno not in _LACKING or path.exists():
            raise
        temporary.replace(path)  # the file system has no hard links
        return
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PART}")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk.

    A directory is left to a file system that cannot sync it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _LACKING or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. Other threads run meanwhile."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256", _bufsize=BLOCK_BYTES).hexdigest()


def folder_bytes(folder: Path) -> int:
    """Return the total size of the files under `folder`. Files deleted meanwhile count 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def lock(descriptor: int, *, shared: bool = False, wait_s: float = 0.0) -> None:
    """Lock an open file or directory until its descriptor is closed or the process ends.

    An exclusive lock excludes all others. Shared locks exclude only exclusive ones. Locking a
    descriptor again converts its lock.

    Raises: BlockingIOError when another process still holds the lock after `wait_s` seconds;
            LocksUnsupported; OSError.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
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
    """Return whether `path` still names the open file or directory.

    A process that waited for a lock may hold it on a file that its owner has deleted.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def expanded(path: Path | str) -> Path:
    """Return the path with a leading `~` replaced by the home directory.

    Raises: DataError when the home directory is unknown, or the path is a URL.
    """
    require_local(path, error=DataError)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path}: no home directory is known for {Path(path).parts[0]!r}.",
            fix="Write the full path, starting with /.",
        ) from error


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run directory and return its descriptor. Links are not followed.

    Opening a pipe does not block.
    Raises: CheckpointError when it is a link, is not a regular file, or has a second hard link and
            is opened for writing; OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK}:  # FreeBSD reports EMLINK
            raise _link_error(path) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{path} is not a regular file.",
            fix=f"Delete {path}, or choose a different directory with --run-dir DIR.",
        )
    if status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
        os.close(descriptor)
        own, copy = in_shell(path), in_shell(path.with_name(f"{path.name}.copy"))
        raise CheckpointError(
            f"{path} has a second hard link: writing to it would change the other file too.",
            fix=f"Replace it with a copy, `cp {own} {copy} && mv {copy} {own}`, "
            "or choose a different directory with --run-dir DIR.",
        )
    return descriptor


def refuse_links(paths: Iterable[Path]) -> None:
    """Check that no path is a symbolic link, so that a run only writes inside its directory.

    Raises: CheckpointError naming the first link.
    """
    for path in paths:
        if path.is_symlink():
            raise _link_error(path)


def _link_error(path: Path) -> CheckpointError:
    target = os.readlink(path) if path.is_symlink() else "another file"
    return CheckpointError(
        f"{path} is a symbolic link to {target}: a run does not write through links.",
        fix=f"Replace {path} with what it points to, or delete it. Only the directory of all "
        "checkpoints may be a link, to a different disk.",
    )


@contextlib.contextmanager
def writing(out: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError that names `out`.

    Raises: Unfinished when the disk is full or fails; DataError otherwise.
    """
    try:
        yield
    except OSError as error:
        raise not_written(out, error) from error


def not_written(out: Path | str, error: Exception) -> DataError:
    """Return the error to raise when `out` could not be written.

    It is Unfinished when the disk is full or has failed.
    """
    number = _number_of(error)
    reason = os.strerror(number) if number else str(error)
    if number in {*_FULL, *_FIXES, errno.EMFILE, errno.ENFILE}:
        fix = unless_broken(error, "Free space there. Then run the same command again.")
        return Unfinished(f"Cannot write {out}: {reason}.", fix=fix)
    return DataError(
        f"Cannot write {out}: {reason}.", fix="Choose a directory that can be written."
    )


@contextlib.contextmanager
def writing_run(folder: Path) -> Iterator[None]:
    """Turn an OSError of the disk inside the block into a RunFailed that names the file.

    `folder` is named when the error has no file name. Other errors pass.
    Raises: RunFailed.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, _NOT_OF_DISKS):
            raise
        raise RunFailed(
            f"Cannot write {error.filename or folder}: {error.strerror or error}.",
            fix=disk_fix(error),
        ) from error


def unless_broken(error: Exception, fix: str) -> str:
    """Return `fix`, or what helps when the error has a cause of its own, such as a broken disk."""
    number = _number_of(error)
    if number in {errno.EMFILE, errno.ENFILE}:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"A process may open {most:,} files here: raise that, for example `ulimit -n 4096`."
    return _FIXES.get(number or 0, fix)


def disk_fix(error: Exception) -> str:
    """Return the fix for a disk that fails to read or write in a run directory."""
    number = _number_of(error)
    if number in _READ_ONLY:
        return (
            "Make it writable, then run the same command again. "
            "Or choose a different directory with --run-dir DIR."
        )
    if number in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}:
        return (
            "Do not move the run directory during training, and use the same one in all processes. "
            "Then run the same command again."
        )
    again = "Run the same command again. If it fails again, choose a different one: --run-dir DIR."
    free = "Free space on that disk, then run the same command again."
    return unless_broken(error, free if is_full(error) else again)


def is_full(error: Exception) -> bool:
    """Return whether a write failed because the disk is full, or its quota is used up."""
    return _number_of(error) in _FULL or "No space left" in str(error)


def _number_of(error: Exception) -> int | None:
    """Return the error number. safetensors and torch state it only in the text of their errors."""
    stated = re.search(r"(?:os error |\()(\d+)\)", str(error))
    return getattr(error, "errno", None) or (int(stated[1]) if stated else None)


def load_torch(path: Path, kind: type[UsageError] = CheckpointError) -> Any:
    """Return what a file of torch.save contains, on the CPU, without executing anything in it.

    Since torch 1.6, it is mapped.

    Raises: `kind` when it contains code, or is damaged.
    """
    import warnings
    import zipfile  # with five compressors, which most commands do not need

    import torch

    try:
        with path.open("rb") as file:
            start = file.read(2)
        is_zip = zipfile.is_zipfile(path)
        if not is_zip and start in (b"", b"PK"):
            raise EOFError("the file is empty or truncated")
        with warnings.catch_warnings(action="ignore"):  # of what an error says as well
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch's unpickler raises errors of any kind for a damaged file
        # its message about weights_only tells users how to run the file's code
        if "weights_only" in str(error):
            raise kind(
                f"{path} contains Python code or objects in a pickle, or is damaged. Reading them "
                "would execute code.",
                fix="If you trust the file, load it with the tool that wrote it, and save only its "
                "tensors, with torch.save or safetensors.torch.save_file.",
            ) from error
        raise unreadable(path, error, kind) from error


def require_checksums(path: Path, kind: type[UsageError] = CheckpointError) -> None:
    """Check a file of torch.save against the checksums in it, if it has any.

    Raises: `kind`.
    Cost:   reads the file: 0.45 s per GB, where loading takes 2.4 s.
    """
    import zipfile

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if archive.infolist()[0].CRC and (damaged := archive.testzip()):
                raise kind(
                    f"{path} is damaged: {damaged} in it does not match its checksum.",
                    fix="Copy or write the file again.",
                )


def unreadable(
    path: Path, error: Exception, kind: type[UsageError] = CheckpointError
) -> UsageError:
    """Return the error for a file of tensors that is damaged."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return kind(f"Cannot read {path}: {reason[:200]}.", fix="Copy or write the file again.")
