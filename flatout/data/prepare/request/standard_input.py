"""Standard input, saved to a file so that several processes can read it more than once.

The file belongs to this process, which holds a lock on it; an unlocked one was left by a killed
process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import IO

from flatout.errors import DataError
from flatout.files import is_open_at, lock, unless_broken
from flatout.progress import SILENT, Progress
from flatout.sources.encodings import open_utf8
from flatout.sources.packed import Unread

_BLOCK = 1 << 20
_COMPRESSED = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PAR1": ".parquet",
}
"""First bytes of compressed and Parquet files, and the suffixes of such files."""
_KINDS = {
    ".txt": "one text",
    ".jsonl": "JSONL",
    ".json": "JSON",
    ".html": "HTML",
    ".parquet": "Parquet",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PREFIX = ".stdin-"


def spool_standard_input(
    directory: Path | None = None,
    *,
    stream: IO[bytes] | None = None,
    encoding: str | None = None,
    progress: Progress = SILENT,
) -> tuple[Path, str]:
    """Save standard input to a file until the process ends, and return it with its SHA-256.

    The first bytes decide the file's suffix: Parquet, JSONL, JSON or HTML, compressed or not, else
    one text. `encoding` is for text that is not UTF-8. Files left in the directory by killed
    processes are removed.

    Raises: DataError when the disk is full.
    """
    directory = directory or Path(tempfile.gettempdir())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        descriptor, path = _create_locked(directory)
        try:
            with (
                open(descriptor, "wb", closefd=False) as file,
                progress.task("Reading standard input", unit="MB") as task,
            ):
                digest, size = hashlib.sha256(), 0
                source = sys.stdin.buffer if stream is None else stream
                while block := source.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                    task.advance(len(block) / 1e6)
            suffix = _compression(path)
            if suffix == ".parquet":
                path = path.rename(path.with_suffix(suffix))
            else:
                path = path.rename(path.with_suffix(f".txt{suffix}"))
                kind = _kind(_beginning(path, encoding))
                path = path.rename(path.with_name(path.name.replace(".txt", kind)))
        except BaseException:
            _remove(path, descriptor)
            raise
    except OSError as error:
        raise DataError(
            f"Cannot save standard input in {directory}: {error.strerror or error}.",
            fix=unless_broken(error, "Free space there, or write the text to a file and name it."),
        ) from error
    atexit.register(_remove, path, descriptor)
    compressed = ", compressed" if len(path.suffixes) > 1 else ""
    progress.say(f"Standard input: {size:,} bytes, read as {_KINDS[path.suffixes[0]]}{compressed}.")
    return path, digest.hexdigest()


def _create_locked(directory: Path) -> tuple[int, Path]:
    """Return a new file that stays locked until its descriptor is closed or the process ends."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".part", dir=directory)
        lock(descriptor, wait_s=math.inf)
        if is_open_at(
            Path(name), descriptor
        ):  # else another process removed it before it was locked
            return descriptor, Path(name)
        os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    """Remove the files that no process has locked; skip those of other users."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                lock(descriptor)
                path.unlink()
            finally:
                os.close(descriptor)


def _compression(path: Path) -> str:
    """Return the suffix for the file's compression, or `.parquet`; empty for a plain file."""
    with path.open("rb") as file:
        first = file.read(4)
    return next((suffix for magic, suffix in _COMPRESSED.items() if first.startswith(magic)), "")


def _beginning(path: Path, encoding: str | None) -> bytes:
    """Return the first bytes after leading space; none if the file does not decompress.

    The error is reported when the text is read.
    """
    with (
        contextlib.suppress(OSError, EOFError, zlib.error, Unread),
        open_utf8(str(path), encoding) as file,
    ):
        block = file.read(_BLOCK).removeprefix(_BYTE_ORDER_MARK).lstrip()
        while not block and (block := file.read(_BLOCK)):
            block = block.lstrip()
        return block
    return b""


def _kind(beginning: bytes) -> str:
    """Return the suffix of a file that starts with these bytes."""
    if beginning.startswith(b"{"):
        return ".jsonl"
    if re.match(rb"\[\s*\{", beginning):
        return ".json"
    html = rb"(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)\b"
    return ".html" if re.match(html, beginning, re.IGNORECASE) else ".txt"


def _remove(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)
