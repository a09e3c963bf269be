"""Files: text and HTML (a file is a document), JSONL, JSON, CSV and Parquet (a row is a document),
packed or not; here or at an address.
"""

from __future__ import annotations

import os
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from flatout.errors import DataError
from flatout.sources import FIRST_NAMED, BadRow, Document, LeftOut, ReadTask, Row
from flatout.sources.encodings import open_utf8
from flatout.sources.fields import Fields
from flatout.sources.html import HTML_SUFFIXES, read_html, require_html
from flatout.sources.json_files import JSON_SUFFIXES, read_json
from flatout.sources.local import Wanted, find_local, full_suffix_of, is_hidden, suffix_of
from flatout.sources.long import decoded, measure
from flatout.sources.originals import LocalFile, Original, RemoteFile, fingerprint
from flatout.sources.packed import (
    CANNOT_BE_READ,
    NotHandedOut,
    Unread,
    is_packed,
    require_opener,
    unreadable,
)
from flatout.sources.parquet import (
    PARQUET_SUFFIXES,
    RowGroups,
    cut_parquet,
    read_row_groups,
    require_parquet,
)
from flatout.sources.rows import read_rows
from flatout.sources.tables import TABLE_SUFFIXES, read_table
from flatout.transfer.reading import find_remote
from flatout.transfer.urls import is_url, protocol_of

PART_BYTES = 4 << 20
"""About how much text one part holds; a text file is never cut, one of rows is."""
LONG_BYTES = 8 << 20
"""A text file with more text is not held, but read in chunks."""
REMOTE_PART_BYTES = 32 << 20
"""The same of a remote file: a part of it reads up to a block too much, and Parquet's index once
more.
"""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex"}
ROW_SUFFIXES = {".jsonl", ".ndjson"}
"""With Parquet, what a folder is searched for. A file named outright, or by a glob, may have any
name; rows are read of these alone.
"""
_SEARCHED_SUFFIXES = frozenset(TEXT_SUFFIXES | ROW_SUFFIXES | PARQUET_SUFFIXES)
_CONVERTED = {
    ".ipynb": ("a Jupyter notebook", "`jupyter nbconvert --to markdown FILE`"),
    ".rtf": ("an RTF document", "`pandoc FILE -t plain -o FILE.txt`"),
    ".docx": ("a Word document", "`pandoc FILE -t plain -o FILE.txt`"),
    ".odt": ("an OpenDocument text", "`pandoc FILE -t plain -o FILE.txt`"),
    ".epub": ("an EPUB book", "`pandoc FILE -t plain -o FILE.txt`"),
    ".pdf": ("a PDF", "`pdftotext FILE`"),
}
"""What is not read, by the endings of names, and a command that makes text of it."""
FINGERPRINT_BYTES = 256 << 20
COMPARED_BYTES = 1 << 20
"""So much of a file is read at most to tell whether another is its copy."""
OPENED_AT_ONCE = 16
"""Parquet files whose row groups are looked up at the same time: what takes long is waiting for a
server.
"""


@dataclass(frozen=True)
class Found:
    """A file to read."""

    path: str
    name: str
    """Its name inside the folder or pattern, or its address."""
    size: int
    mark: str = ""
    """What tells its content from another, at an address; of a file here, that is still to be read.
    """
    stat: os.stat_result | None = None
    """Of a file here."""


@dataclass(frozen=True)
class Span:
    """Bytes of one file that a part reads: the whole of a text file, the rows of JSONL that begin
    in [start, end).
    """

    path: str
    start: int
    end: int
    encoding: str | None = None
    """That of its text; None for UTF-8."""

    @property
    def num_bytes(self) -> int:
        """About how much text that is."""
        return (self.end - self.start) * (3 if is_packed(self.path) else 1)


Piece = Span | RowGroups


def files(
    path: str,
    text_field: str = "text",
    mask_field: str | None = None,
    include: Sequence[str] = (),
    encoding: str | None = None,
) -> list[ReadTask]:
    """Return the parts of a file, a folder (searched recursively, in sorted order), a glob, or an
    address of any of these.

    `include` are patterns of names that are taken from folders besides those that always are;
    `encoding` is that of text that is not UTF-8.

    Raises: DataError when nothing is there, with the nearest name that is; MissingPackage when
            reading takes one.
    """
    fields = Fields(text_field, mask_field)
    found, passed_over = find_files(path, tuple(include))
    for file in found:
        require_opener(file.path)
        if is_parquet(file.name):
            require_parquet(file.path)
        elif suffix_of(file.name) in HTML_SUFFIXES:
            require_html(file.path)
    if mask_field is not None and not any(_holds_rows(file.name) for file in found):
        raise DataError(
            f"{path} holds no rows, so it has no field {mask_field!r}.",
            fix="Leave --mask-field out, or name JSONL, JSON, CSV or Parquet.",
        )
    if encoding is not None and all(is_parquet(file.name) for file in found):
        raise DataError(
            f"{path}: the text in Parquet is always UTF-8.", fix="Leave --encoding out."
        )
    per_file = max(4096, FINGERPRINT_BYTES // len(found))
    with ThreadPoolExecutor(OPENED_AT_ONCE) as threads:
        cut = threads.map(lambda file: _cut(file, fields, encoding), found)
        originals = threads.map(lambda file: _original(file, path, per_file), found)
        first, *others = _parts(list(zip(found, originals, cut, strict=True)), fields)
    return [replace(first, arguments=(*first.arguments, _counted(passed_over))), *others]


SOURCE = files


def _counted(passed_over: Sequence[str]) -> tuple[LeftOut, ...]:
    """Return files that are not read as what is left out, by the endings of their names, the first
    of each named.
    """
    by_suffix: dict[str, list[str]] = {}
    for name in passed_over:
        by_suffix.setdefault(full_suffix_of(name), []).append(name)
    return tuple(
        LeftOut(
            f"{suffix} file" if suffix else "file without an ending",
            name,
            count=len(names) - FIRST_NAMED + 1 if index == FIRST_NAMED - 1 else 1,
        )
        for suffix, names in sorted(by_suffix.items(), key=lambda item: (-len(item[1]), item[0]))
        for index, name in enumerate(names[:FIRST_NAMED])
    )


def passed_over_in(parts: Iterable[ReadTask]) -> tuple[LeftOut, ...]:
    """Return the files that were passed over where the files of some parts were searched for."""
    return tuple(
        chain.from_iterable(
            part.arguments[2]
            for part in parts
            if part.read is read_pieces and len(part.arguments) > 2
        )
    )


def _cut(file: Found, fields: Fields, encoding: str | None) -> list[Piece]:
    limit = REMOTE_PART_BYTES if is_url(file.path) else PART_BYTES
    if is_parquet(file.name):
        return list(cut_parquet(file.path, file.size, fields, limit))
    whole = max(file.size, 1)
    step = limit if is_rows(file.name) and not is_packed(file.name) and encoding is None else whole
    return [
        Span(file.path, start, min(start + step, file.size), encoding)
        for start in range(0, whole, step)
    ]


def _parts(cut: list[tuple[Found, Original, list[Piece]]], fields: Fields) -> Iterator[ReadTask]:
    """Yield parts of about PART_BYTES; a file's mark goes with its first piece."""
    held: list[Piece] = []
    marks: list[str] = []
    originals: list[Original] = []
    held_bytes = 0
    for file, original, pieces in cut:
        for index, piece in enumerate(pieces):
            if held and held_bytes + piece.num_bytes > PART_BYTES:
                yield ReadTask(
                    read_pieces,
                    (tuple(held), fields),
                    "\n".join(marks),
                    held_bytes,
                    tuple(originals),
                )
                held, marks, originals, held_bytes = [], [], [], 0
            held.append(piece)
            held_bytes += piece.num_bytes
            if index == 0:
                marks.append(_mark(file, original))
                originals.append(original)
    yield ReadTask(
        read_pieces, (tuple(held), fields), "\n".join(marks), held_bytes, tuple(originals)
    )


def find_files(path: str, include: tuple[str, ...] = ()) -> tuple[list[Found], list[str]]:
    """Return every file that `path` stands for, sorted, and those of the folders it names that are
    passed over for their names.

    Raises: DataError when there is none.
    """
    wanted = Wanted(_SEARCHED_SUFFIXES, include)
    if is_url(path) and protocol_of(path) == "file":
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    if is_url(path):
        passed_over: dict[str, None] = {}

        def takes(name: str) -> bool:
            if not is_hidden(name) and not wanted.takes(name):
                passed_over[f"{path.rstrip('/')}/{name.lstrip('/')}"] = None
            return not is_hidden(name) and wanted.takes(name)

        return [
            Found(entry.url, entry.url, entry.size, entry.mark)
            for entry in find_remote(path, takes)
        ], sorted(passed_over)
    search = find_local(path, wanted)
    stats = ((file, name, file.stat()) for file, name in search.files)
    return [
        Found(str(file), name, stat.st_size, stat=stat) for file, name, stat in stats
    ], search.passed_over


def is_rows(name: str) -> bool:
    """Return whether a file of this name holds JSONL."""
    return suffix_of(name) in ROW_SUFFIXES


def _holds_rows(name: str) -> bool:
    return suffix_of(name) in ROW_SUFFIXES | PARQUET_SUFFIXES | TABLE_SUFFIXES | JSON_SUFFIXES


def is_parquet(name: str) -> bool:
    """Return whether a file of this name holds Parquet."""
    return suffix_of(name) in PARQUET_SUFFIXES


def _original(file: Found, asked: str, limit: int) -> Original:
    """Return the file as it was found, with a digest of its content, or of a remote file with what
    its server says.
    """
    if file.stat is None:
        return RemoteFile(file.path, asked, file.size, file.mark)
    digest = fingerprint(Path(file.path), file.size, limit)
    return LocalFile(
        file.path,
        file.size,
        file.stat.st_mtime_ns,
        file.stat.st_ctime_ns,
        file.stat.st_ino,
        digest,
        limit,
    )


def _mark(file: Found, original: Original) -> str:
    """Return what changes when the file does: its name, its size, and its digest, or of a remote
    file what its server says.
    """
    return f"{file.name} {file.size} {original.digest if isinstance(original, LocalFile) else original.mark}"


def first_changed(parts: Iterable[ReadTask]) -> str | None:
    """Return the first file that is no longer what it was when the parts were made; None when all
    are. Web pages are not asked again.

    Raises: Unreachable when a store does not answer.
    """
    remote: dict[str, list[RemoteFile]] = {}
    for original in (one for part in parts for one in part.originals):
        if isinstance(original, RemoteFile):
            remote.setdefault(original.asked, []).append(original)
        elif original.has_changed():
            return original.path
    for asked, before in remote.items():
        if protocol_of(asked) not in (
            "http",
            "https",
        ):  # servers behind one name may describe a page differently
            now = {
                (entry.url, entry.size, entry.mark) for entry in find_remote(asked, lambda _: True)
            }
            changed = (
                one.address for one in before if (one.address, one.size, one.mark) not in now
            )
            if (first := next(changed, None)) is not None:
                return first
    return None


def files_of(part: ReadTask) -> list[str]:
    """Return the files that a part reads, here or at addresses; none of a source other than this
    one.
    """
    return [piece.path for piece in part.arguments[0]] if part.read is read_pieces else []


def has_rows(part: ReadTask) -> bool:
    """Return whether a part may hold rows: one of files only where their names say so."""
    return part.read is not read_pieces or any(_holds_rows(path) for path in files_of(part))


def shared_file(some: Iterable[ReadTask], others: Iterable[ReadTask]) -> str | None:
    """Return the first file that parts of `others` read and parts of `some` too; None when there is
    none.

    Files at addresses are told by these, files here by their content, whatever they are called: by
    size and, of those of one size, by a digest of sixteen blocks. Empty ones are passed over.
    """
    first, second = (
        [path for part in parts for path in files_of(part)] for parts in (some, others)
    )
    sizes = _sizes(first) & _sizes(second)
    known = {_told_by(path, sizes) for path in first}
    return next(
        (path for path in second if (mark := _told_by(path, sizes)) is not None and mark in known),
        None,
    )


def _sizes(paths: list[str]) -> set[int]:
    return {Path(path).stat().st_size for path in paths if not is_url(path)} - {0}


def _told_by(path: str, sizes: set[int]) -> str | None:
    """Return what tells a file from others, None for one here that is of none of these sizes."""
    if is_url(path):
        return path
    size = Path(path).stat().st_size
    return f"{size} {fingerprint(Path(path), size, COMPARED_BYTES)}" if size in sizes else None


def read_pieces(
    pieces: tuple[Piece, ...], fields: Fields, passed_over: tuple[LeftOut, ...] = ()
) -> Iterator[Row]:
    """Yield what was passed over, and the documents of some pieces.

    What is damaged is one bad row, which counts the piece as lost: nobody knows how much there was.

    Raises: DataError when a server or the system does not hand a file out, which is no fault of the
            text.
    """
    yield from passed_over
    for piece in pieces:
        try:
            if isinstance(piece, RowGroups):
                yield from read_row_groups(piece, fields)
            else:
                yield from _read(piece, fields)
        except Unread as error:
            yield BadRow.of(
                error,
                error.reason,
                piece.path,
                unread_bytes=piece.num_bytes if _holds_rows(piece.path) else 0,
            )
        except (OSError, EOFError, zlib.error) as error:
            unread = unreadable(piece.path, error)
            if isinstance(unread, NotHandedOut):
                raise unread from error
            yield BadRow.of(unread, CANNOT_BE_READ, piece.path, unread_bytes=piece.num_bytes)


def _read(piece: Span, fields: Fields) -> Iterable[Row]:
    """Return the documents of a piece, read as the ending of its name says; a file of any other
    name is a text.
    """
    path, suffix = piece.path, suffix_of(piece.path)
    if suffix in ROW_SUFFIXES:
        return read_rows(path, piece.start, piece.end, fields, piece.encoding)
    if suffix in TABLE_SUFFIXES:
        return read_table(path, suffix, fields, piece.encoding)
    if suffix in JSON_SUFFIXES:
        return read_json(path, fields, piece.encoding)
    if suffix in HTML_SUFFIXES:
        return [read_html(path, piece.encoding)]
    if suffix in _CONVERTED:
        name, command = _CONVERTED[suffix]
        fix = f"Make text of it, for example with {command}, and read that in its place, or skip such files with --on-bad-row skip."
        return [BadRow(f"is {name}, not text", fix, f"{suffix} file", path)]
    return [read_text(path, piece.encoding)]


def read_text(path: str, encoding: str | None = None) -> Row:
    """Return a text file as one document, less the byte order mark it may begin with.

    Raises: NotUtf8; WrongEncoding.
    """
    with open_utf8(path, encoding) as file:
        data = file.read(LONG_BYTES + 1)
    return Document(
        measure(path, encoding) if len(data) > LONG_BYTES else decoded(data, path), path
    )
