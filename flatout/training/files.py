"""A run's small files: JSON whole or absent, lines of it, digests. No torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flatout.data.disk import write_text
from flatout.errors import CheckpointError, RunFailed, in_shell
from flatout.recognised import open_regular, read_regular

Document = TypeVar("Document", bound=BaseModel)

DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
"""What the system says when a disk does not take a file."""
RESTORE = "Restore it from a copy, or use another checkpoint or run."
"""What to do about a damaged file."""


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
    """Return the JSON document in `path` as a `model`; nothing is converted, and keys it does not know are left out.

    Raises: CheckpointError naming the file and the key when it is missing, is not JSON, or is not such a document.
    """
    try:
        return model.model_validate(read_json(path), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged: {f'{key}: ' if key else ''}{first['msg']}.", fix=fix) from error


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
        raise RunFailed(f"Cannot write {error.filename or folder}: {error.strerror or error}.", fix=way_out(error)) from error


def way_out(error: Exception) -> str:
    """Return what to do when a disk refuses to read or write; safetensors and torch tell the system's number in their text alone."""
    told = re.search(r"(?:os error |\()(\d+)\)", str(error))
    number = int(told[1]) if told else getattr(error, "errno", None)
    if number == errno.EIO:
        return "That disk has failed to read or write (the system's log, `dmesg`, says more): check it, or copy the run directory to another disk."
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "Make that place writable, then run the same command again; or choose another folder with --run DIR."
    if number in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}:
        return "Keep the run directory where it is while the run trains, the same one for all its processes; then run the same command again."
    if number == errno.ENAMETOOLONG:
        return "Choose a shorter path with --run DIR."
    return "Free space on that disk, then run the same command again."


@contextmanager
def understanding(path: Path) -> Iterator[None]:
    """Name `path` when what was read from it lacks a key, or has a value of another kind or nesting than was written.

    Raises: CheckpointError.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.", fix=RESTORE) from error


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run directory and return its descriptor; a link is not followed, and a pipe is not waited for.

    Raises: CheckpointError when it is a link, not a regular file, or to be written while it has a second hard link; OSError.
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
        raise CheckpointError(f"{path} is not a regular file.", fix=f"Delete {path}, or choose another folder with --run DIR.")
    if found.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
        os.close(descriptor)
        copy = path.with_name(f"{path.name}.copy")
        raise CheckpointError(
            f"{path} has another hard link: what a run writes to it would change the other file too.",
            fix=f"Replace it with a copy, `cp {in_shell(path)} {in_shell(copy)} && mv {in_shell(copy)} {in_shell(path)}`, "
            "or choose another folder with --run DIR.",
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
    return CheckpointError(f"{path} is a symbolic link to {target}: a run does not write through links.", fix=fix)


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Add one JSON line to `path`. A line that a kill left unfinished is closed first, so that it spoils no other."""
    line = json.dumps(document).encode() + b"\n"
    with os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            line = b"\n" + line
        file.write(line)


def read_lines(path: Path, *, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of `path` (only those that begin in its last `tail_bytes`); an unfinished line is left out.

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
