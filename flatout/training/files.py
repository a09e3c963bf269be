"""A run's small files: JSON whole or absent, lines of it, digests. No torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.data.disk import write_text
from flatout.errors import CheckpointError


def write_json(path: Path, document: Any) -> None:
    """Write `document` as JSON, whole or not at all. Floats come back equal in every bit."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Return the JSON document in `path`.

    Raises: CheckpointError naming the file when it is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.", fix="Restore it from a copy, or use another checkpoint or run.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON.", fix="Restore it from a copy, or use another checkpoint or run.") from error


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run directory and return its descriptor; a link is not followed, and a pipe is not waited for.

    Raises: CheckpointError when it is a link or no regular file; OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK}:  # the second is FreeBSD's
            raise _is_a_link(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.", fix=f"Delete {path}, or choose another folder with --run DIR.")
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
    """Yield the JSON lines of `path` (only those that begin in its last `tail_bytes`); an unfinished line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = 0 if tail_bytes is None else max(size - tail_bytes, 0)
        file.seek(start)
        if start:
            file.readline()
        for line in file:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict):
                yield document


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
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
