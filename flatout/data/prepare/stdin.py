"""Standard input, kept in a file: it can be read only once, and preparing reads its text more
often, from several processes.

The file is the process's own, whatever it holds, and locked while the process lives: one that
nobody locks was left by a kill.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import IO

from flatout.errors import DataError
from flatout.files import unless_broken
from flatout.progress import SILENT, Progress
from flatout.sources.encodings import open_utf8
from flatout.sources.packed import Unread

_BLOCK = 1 << 20
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
"""How packed bytes begin, and the ending of a file that holds them."""
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
    folder: Path | None = None,
    *,
    stream: IO[bytes] | None = None,
    encoding: str | None = None,
    progress: Progress = SILENT,
) -> tuple[Path, str]:
    """Write standard input to a file in `folder` and return it with its SHA-256; it is removed when
    the process ends.

    Files that killed processes left there are removed.

    Its name ends as what it holds: Parquet, or packed or plain JSONL, JSON or HTML when it begins
    as these do, else one text. `encoding` is that of text that is not UTF-8.

    Raises: DataError when there is no room for it, or what it begins with does not unpack.
    """
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        handle, part = _opened(folder)
        try:
            with (
                open(handle, "wb", closefd=False) as file,
                progress.task("Reading standard input", unit="MB") as task,
            ):
                digest, size = hashlib.sha256(), 0
                source = sys.stdin.buffer if stream is None else stream
                while block := source.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                    task.advance(len(block) / 1e6)
            packed = _packed(part)
            part = part.rename(
                part.with_suffix(packed if packed == ".parquet" else f".txt{packed}")
            )
            if packed != ".parquet":
                part = part.rename(
                    part.with_name(part.name.replace(".txt", _kind(_beginning(part, encoding))))
                )
        except BaseException:
            _remove(part, handle)
            raise
    except OSError as error:
        raise DataError(
            f"Cannot keep standard input in {folder}: {error.strerror or error}.",
            fix=unless_broken(error, "Make room there, or write the text to a file and name that."),
        ) from error
    atexit.register(_remove, part, handle)
    progress.say(
        f"Standard input: {size:,} bytes, read as {_KINDS[part.suffixes[0]]}{', packed' if len(part.suffixes) > 1 else ''}."
    )
    return part, digest.hexdigest()


def _opened(folder: Path) -> tuple[int, Path]:
    """Return a new file of this process alone, open and locked until it is closed, which the system
    does when the process ends.
    """
    while True:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".part", dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(
            handle
        ).st_nlink:  # else another process took it for one that was left, before it was locked
            return handle, Path(name)
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove the files that no process locks; what belongs to others may stay."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(handle)


def _packed(path: Path) -> str:
    """Return the ending of a name that says how the file is packed; Parquet is a kind of its own,
    and what is plain has none.
    """
    with path.open("rb") as file:
        beginning = file.read(4)
    return next((ending for magic, ending in _PACKED.items() if beginning.startswith(magic)), "")


def _beginning(path: Path, encoding: str | None) -> bytes:
    """Return some bytes from the first that is no space on; of a file that does not unpack, none:
    reading it says so.
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
    """Return the ending of a name that says what begins like this."""
    if beginning.startswith(b"{"):
        return ".jsonl"
    if re.match(rb"\[\s*\{", beginning):
        return ".json"
    return (
        ".html"
        if re.match(rb"(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)\b", beginning, re.IGNORECASE)
        else ".txt"
    )


def _remove(path: Path, handle: int) -> None:
    path.unlink(missing_ok=True)
    os.close(handle)
