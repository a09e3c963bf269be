"""Standard input, saved to a file so that several processes can read it more than once."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path

from flatout.data.sources.packed import unpacked
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
    ".jsonl": rb"\{",
    ".json": rb"\[\s*\{",
    ".html": rb"(?i:(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)\b)",
    ".txt": b"",
}
"""How a text starts, after white space, and the suffix that decides how it is read."""


def spool_standard_input(directory: Path, *, progress: Progress = SILENT) -> tuple[Path, str]:
    """Save standard input to a file until the process ends, and return it with its SHA-256.

    The first bytes decide the file's suffix: Parquet, JSONL, or JSON and HTML, which the reader
    rejects, compressed or not, else one text. Files of killed processes are removed.

    Raises: DataError when the disk is full.
    """
    digest = hashlib.sha256()
    try:
        block = sys.stdin.buffer.read(_BLOCK)
        packed = next((suffix for magic, suffix in _PACKED.items() if block.startswith(magic)), "")
        suffix = packed if packed == ".parquet" else _kind(block, packed) + packed
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), left.open("rb") as file:
                lock(file.fileno())  # its process holds the lock
                left.unlink()
        descriptor, name = tempfile.mkstemp(suffix, _PREFIX, directory)
        path = Path(name)
        atexit.register(path.unlink, missing_ok=True)
        with contextlib.suppress(OSError):  # this disk has no locks
            lock(os.dup(descriptor))
        with open(descriptor, "wb") as file, progress.task("Reading standard input"):
            while block:
                digest.update(block)
                file.write(block)
                block = sys.stdin.buffer.read(_BLOCK)
    except OSError as error:
        raise DataError(
            f"Cannot save standard input in {directory}: {error.strerror or error}.",
            fix=unless_broken(error, "Free space there, or write the text to a file and name it."),
        ) from error
    progress.say(f"Standard input: {path.stat().st_size:,} bytes, read as a {suffix} file.")
    return path, digest.hexdigest()


def _kind(block: bytes, packed: str) -> str:
    """Return the suffix of a text that starts like this, compressed as `packed` says.

    An error in the file is reported when the text is read.
    """
    start = b""
    with contextlib.suppress(OSError, EOFError, zlib.error):
        start = unpacked(io.BytesIO(block), packed).read1(_BLOCK)
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    return next(suffix for suffix, begins in _KINDS.items() if re.match(begins, start))
