"""Standard input, kept in a file: it can be read only once, and preparing reads its text more often, from several processes."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.sources.packed import open_bytes

_BLOCK = 1 << 20
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}
"""How packed bytes begin, and the ending of a file that holds them."""
_KINDS = {".txt": "one text", ".jsonl": "JSONL", ".parquet": "Parquet"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def spool_standard_input(folder: Path | None = None, *, stream: IO[bytes] | None = None, progress: Progress = SILENT) -> tuple[Path, str]:
    """Write standard input to a file in `folder` and return it with its SHA-256; it is removed when the process ends.

    Its name ends as what it holds: Parquet, or packed or plain, JSONL when the first character that is no space is `{`, else one text.

    Raises: DataError when there is no room for it, or what it begins with does not unpack.
    """
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".stdin-", suffix=".part", dir=folder)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file, progress.task("Reading standard input", unit="MB") as task:
                digest, size = hashlib.sha256(), 0
                source = sys.stdin.buffer if stream is None else stream
                while block := source.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                    task.advance(len(block) / 1e6)
            target = _named(part, digest.hexdigest())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(
            f"Cannot keep standard input in {folder}: {error.strerror or error}.", fix="Make room there, or write the text to a file and name that."
        ) from error
    atexit.register(_remove, target)
    progress.say(f"Standard input: {size:,} bytes, read as {_KINDS[target.suffixes[0]]}{', packed' if len(target.suffixes) > 1 else ''}.")
    return target, digest.hexdigest()


def _named(part: Path, sha256: str) -> Path:
    """Give the file the name that says what it holds, so that it is read as any file of such a name."""
    with part.open("rb") as file:
        beginning = file.read(4)
    base = f".stdin-{sha256[:16]}"
    if beginning == b"PAR1":
        return part.rename(part.with_name(f"{base}.parquet"))
    ending = next((ending for magic, ending in _PACKED.items() if beginning.startswith(magic)), "")
    target = part.rename(part.with_name(f"{base}.txt{ending}"))
    try:
        if _first_byte(target) == b"{":
            target = target.rename(target.with_name(f"{base}.jsonl{ending}"))
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def _first_byte(path: Path) -> bytes:
    """Return the first byte that is no space; of a file that does not unpack, none: reading it says so."""
    with contextlib.suppress(OSError, EOFError), open_bytes(str(path)) as file:
        block = file.read(_BLOCK).removeprefix(_BYTE_ORDER_MARK).lstrip()
        while not block and (block := file.read(_BLOCK)):
            block = block.lstrip()
        return block[:1]
    return b""


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
