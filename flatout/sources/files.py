"""Files: text (a file is a document), JSONL and Parquet (a row is a document), packed or not; a file, a folder, a glob, here or at an address."""

from __future__ import annotations

import json
import os
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import DataError
from flatout.sources import BadRow, Document, Part, Row
from flatout.sources.fields import ROW_BYTES, Fields
from flatout.sources.local import find_local, is_hidden, suffix_of
from flatout.sources.long import NotUtf8, measure, not_utf8
from flatout.sources.originals import LocalFile, Original, RemoteFile, fingerprint
from flatout.sources.packed import CANNOT_BE_READ, NotHandedOut, is_packed, open_bytes, require_opener, unreadable
from flatout.sources.parquet import PARQUET_SUFFIXES, RowGroups, cut_parquet, read_row_groups, require_parquet
from flatout.sources.remote import find_remote, is_address, protocol_of
from flatout.sources.rows import read_rows

PART_BYTES = 4 << 20
"""About how much text one part holds; a text file is never cut, one of rows is."""
LONG_BYTES = 8 << 20
"""A text file with more text is not held, but read in chunks."""
REMOTE_PART_BYTES = 32 << 20
"""The same of a remote file: a part of it reads up to a block too much, and Parquet's index once more."""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex"}
ROW_SUFFIXES = {".jsonl", ".ndjson"}
"""With Parquet, what a folder is searched for. A file named outright, or by a glob, may have any name; rows are read of these alone."""
_SEARCHED_SUFFIXES = frozenset(TEXT_SUFFIXES | ROW_SUFFIXES | PARQUET_SUFFIXES)
FINGERPRINT_BYTES = 256 << 20
COMPARED_BYTES = 1 << 20
"""So much of a file is read at most to tell whether another is its copy."""
OPENED_AT_ONCE = 16
"""Parquet files whose row groups are looked up at the same time: what takes long is waiting for a server."""


@dataclass(frozen=True)
class Found:
    """A file to read."""

    path: str
    name: str
    """Its name inside the folder or pattern, or its address."""
    size: int
    mark: str = ""
    """What tells its content from another, at an address; of a file here, that is still to be read."""
    stat: os.stat_result | None = None
    """Of a file here."""


@dataclass(frozen=True)
class Span:
    """Bytes of one file that a part reads: the whole of a text file, the rows of JSONL that begin in [start, end)."""

    path: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """About how much text that is."""
        return (self.end - self.start) * (3 if is_packed(self.path) else 1)


Piece = Span | RowGroups


def files(path: str, text_field: str = "text", mask_field: str | None = None) -> list[Part]:
    """Return the parts of a file, a folder (searched recursively, in sorted order), a glob, or an address of any of these.

    Raises: DataError when nothing is there, with the nearest name that is; MissingPackage when reading takes one.
    """
    fields = Fields(text_field, mask_field)
    found = find_files(path)
    for file in found:
        require_opener(file.path)
        if is_parquet(file.name):
            require_parquet(file.path)
    if mask_field is not None and not any(is_rows(file.name) or is_parquet(file.name) for file in found):
        raise DataError(f"{path} holds no rows, so it has no field {mask_field!r}.", fix="Leave --mask-field out, or name JSONL or Parquet.")
    per_file = max(4096, FINGERPRINT_BYTES // len(found))
    with ThreadPoolExecutor(OPENED_AT_ONCE) as threads:
        cut = threads.map(lambda file: _cut(file, fields), found)
        originals = threads.map(lambda file: _original(file, path, per_file), found)
        return list(_parts(list(zip(found, originals, cut, strict=True)), fields))


SOURCE = files


def _cut(file: Found, fields: Fields) -> list[Piece]:
    limit = REMOTE_PART_BYTES if is_address(file.path) else PART_BYTES
    if is_parquet(file.name):
        return list(cut_parquet(file.path, file.size, fields, limit))
    whole = max(file.size, 1)
    step = whole if is_packed(file.name) or not is_rows(file.name) else limit
    return [Span(file.path, start, min(start + step, file.size)) for start in range(0, whole, step)]


def _parts(cut: list[tuple[Found, Original, list[Piece]]], fields: Fields) -> Iterator[Part]:
    """Yield parts of about PART_BYTES; a file's mark goes with its first piece."""
    held: list[Piece] = []
    marks: list[str] = []
    originals: list[Original] = []
    held_bytes = 0
    for file, original, pieces in cut:
        for index, piece in enumerate(pieces):
            if held and held_bytes + piece.num_bytes > PART_BYTES:
                yield Part(read_pieces, (tuple(held), fields), "\n".join(marks), held_bytes, tuple(originals))
                held, marks, originals, held_bytes = [], [], [], 0
            held.append(piece)
            held_bytes += piece.num_bytes
            if index == 0:
                marks.append(_mark(file, original))
                originals.append(original)
    yield Part(read_pieces, (tuple(held), fields), "\n".join(marks), held_bytes, tuple(originals))


def find_files(path: str) -> list[Found]:
    """Return every file that `path` stands for, sorted.

    Raises: DataError when there is none.
    """
    if is_address(path) and protocol_of(path) == "file":
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    if is_address(path):
        return [Found(entry.address, entry.address, entry.size, entry.mark) for entry in find_remote(path, _is_searched_for)]
    stats = ((file, name, file.stat()) for file, name in find_local(path, _SEARCHED_SUFFIXES))
    return [Found(str(file), name, stat.st_size, stat=stat) for file, name, stat in stats]


def _is_searched_for(name: str) -> bool:
    return not is_hidden(name) and suffix_of(name) in _SEARCHED_SUFFIXES


def is_rows(name: str) -> bool:
    """Return whether a file of this name holds JSONL."""
    return suffix_of(name) in ROW_SUFFIXES


def is_parquet(name: str) -> bool:
    """Return whether a file of this name holds Parquet."""
    return suffix_of(name) in PARQUET_SUFFIXES


def _original(file: Found, asked: str, limit: int) -> Original:
    """Return the file as it was found, with a digest of its content, or of a remote file with what its server says."""
    if file.stat is None:
        return RemoteFile(file.path, asked, file.size, file.mark)
    digest = fingerprint(Path(file.path), file.size, limit)
    return LocalFile(file.path, file.size, file.stat.st_mtime_ns, file.stat.st_ctime_ns, file.stat.st_ino, digest, limit)


def _mark(file: Found, original: Original) -> str:
    """Return what changes when the file does: its name, its size, and its digest, or of a remote file what its server says."""
    return f"{file.name} {file.size} {original.digest if isinstance(original, LocalFile) else original.mark}"


def first_changed(parts: Iterable[Part]) -> str | None:
    """Return the first file that is no longer what it was when the parts were made; None when all are. Web pages are not asked again.

    Raises: Unreachable when a store does not answer.
    """
    remote: dict[str, list[RemoteFile]] = {}
    for original in (one for part in parts for one in part.originals):
        if isinstance(original, RemoteFile):
            remote.setdefault(original.asked, []).append(original)
        elif original.has_changed():
            return original.path
    for asked, before in remote.items():
        if protocol_of(asked) not in ("http", "https"):  # servers behind one name may describe a page differently
            now = {(entry.address, entry.size, entry.mark) for entry in find_remote(asked, _is_searched_for)}
            changed = (one.address for one in before if (one.address, one.size, one.mark) not in now)
            if (first := next(changed, None)) is not None:
                return first
    return None


def files_of(part: Part) -> list[str]:
    """Return the files that a part reads, here or at addresses; none of a source other than this one."""
    return [piece.path for piece in part.arguments[0]] if part.read is read_pieces else []


def has_rows(part: Part) -> bool:
    """Return whether a part may hold rows: one of files only where they are JSONL or Parquet."""
    return part.read is not read_pieces or any(isinstance(piece, RowGroups) or is_rows(piece.path) for piece in part.arguments[0])


def rows_as_text(parts: Iterable[Part]) -> list[str]:
    """Return the files here that are called JSON and begin with a whole object in a line, as JSONL does, but are read as a text each."""
    named = [path for part in parts for path in files_of(part) if suffix_of(path) == ".json" and not is_address(path)]
    return [path for path in named if _begins_with_a_row(path)]


def _begins_with_a_row(path: str) -> bool:
    try:
        with open_bytes(path) as file:
            return isinstance(json.loads(file.readline(ROW_BYTES)), dict)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False


def shared_file(some: Iterable[Part], others: Iterable[Part]) -> str | None:
    """Return the first file that parts of `others` read and parts of `some` too; None when there is none.

    Files at addresses are told by these, files here by their content, whatever they are called: by size and, of those of one size,
    by a digest of sixteen blocks. Empty ones are passed over.
    """
    first, second = ([path for part in parts for path in files_of(part)] for parts in (some, others))
    sizes = _sizes(first) & _sizes(second)
    known = {_told_by(path, sizes) for path in first}
    return next((path for path in second if (mark := _told_by(path, sizes)) is not None and mark in known), None)


def _sizes(paths: list[str]) -> set[int]:
    return {Path(path).stat().st_size for path in paths if not is_address(path)} - {0}


def _told_by(path: str, sizes: set[int]) -> str | None:
    """Return what tells a file from others, None for one here that is of none of these sizes."""
    if is_address(path):
        return path
    size = Path(path).stat().st_size
    return f"{size} {fingerprint(Path(path), size, COMPARED_BYTES)}" if size in sizes else None


def read_pieces(pieces: tuple[Piece, ...], fields: Fields) -> Iterator[Row]:
    """Yield the documents of some pieces. What is damaged is one bad row, which counts the piece as lost: nobody knows how much there was.

    Raises: DataError when a server or the system does not hand a file out, which is no fault of the text.
    """
    for piece in pieces:
        try:
            if isinstance(piece, RowGroups):
                yield from read_row_groups(piece, fields)
            elif is_rows(piece.path):
                yield from read_rows(piece.path, piece.start, piece.end, fields)
            else:
                yield read_text(piece.path)
        except (OSError, EOFError, zlib.error) as error:
            unread = unreadable(piece.path, error)
            if isinstance(unread, NotHandedOut):
                raise unread from error
            yield BadRow.of(unread, CANNOT_BE_READ, piece.path, unread_bytes=piece.num_bytes)


def read_text(path: str) -> Row:
    """Return a text file as one document, less the byte order mark it may begin with."""
    with open_bytes(path) as file:
        data = file.read(LONG_BYTES + 1)
    try:
        if len(data) > LONG_BYTES:
            return Document(measure(path), path)
        return Document(data.decode("utf-8").removeprefix("\ufeff"), path)
    except NotUtf8 as error:
        return BadRow.of(error, "not UTF-8", path)
    except UnicodeDecodeError as error:
        return BadRow.of(not_utf8(path, error.start, data[error.start]), "not UTF-8", path)
