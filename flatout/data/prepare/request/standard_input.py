"""Standard input, saved to a file so that several processes can read it more than once."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import IO

from flatout.data.sources.packed import Unread, open_bytes
from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.storage.files import lock, unless_broken

_PREFIX = ".stdin-"
_BLOCK = 1 << 20
_PACKED = {
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


def spool_standard_input(
    directory: Path | None = None,
    *,
    stream: IO[bytes] | None = None,
    progress: Progress = SILENT,
) -> tuple[Path, str]:
    """Save standard input to a file until the process ends, and return it with its SHA-256.

    The first bytes decide the file's suffix: Parquet, JSONL, or JSON and HTML, which the reader
    rejects, compressed or not, else one text. Files of killed processes are removed.

    Raises: DataError when the disk is full.
    """
    directory = directory or Path(tempfile.gettempdir())
    digest, size = hashlib.sha256(), 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), left.open("rb") as file:
                lock(file.fileno())  # its process holds the lock
                left.unlink()
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        path = Path(name)
        try:
            with contextlib.suppress(OSError):  # this disk has no locks
                lock(os.dup(descriptor))
            with (
                open(descriptor, "wb") as file,
                progress.task("Reading standard input", unit="MB") as task,
            ):
                source = sys.stdin.buffer if stream is None else stream
                first = block = source.read(_BLOCK)
                while block:
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                    task.advance(len(block) / 1e6)
                    block = source.read(_BLOCK)
            suffix = next((_PACKED[magic] for magic in _PACKED if first.startswith(magic)), "")
            if suffix != ".parquet":  # its text is read by the name of its compression
                path = path.rename(path.with_suffix(suffix))
                suffix = _kind(path) + suffix
            path = path.rename(path.with_suffix(suffix))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(
            f"Cannot save standard input in {directory}: {error.strerror or error}.",
            fix=unless_broken(error, "Free space there, or write the text to a file and name it."),
        ) from error
    atexit.register(path.unlink, missing_ok=True)
    compressed = ", compressed" * (len(path.suffixes) > 1)
    progress.say(f"Standard input: {size:,} bytes, read as {_KINDS[path.suffixes[0]]}{compressed}.")
    return path, digest.hexdigest()


def _kind(path: Path) -> str:
    """Return the suffix of a text that starts as this file does, after leading space.

    An error in the file is reported when the text is read.
    """
    start = b""
    with (
        contextlib.suppress(OSError, EOFError, zlib.error, Unread),
        open_bytes(str(path)) as file,
    ):
        start = file.read(_BLOCK).removeprefix(b"\xef\xbb\xbf").lstrip()
        while not start and (block := file.read(_BLOCK)):
            start = block.lstrip()
    if start.startswith(b"{"):
        return ".jsonl"
    if re.match(rb"\[\s*\{", start):
        return ".json"
    html = rb"(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)\b"
    return ".html" if re.match(html, start, re.IGNORECASE) else ".txt"
