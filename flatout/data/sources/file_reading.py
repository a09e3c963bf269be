"""Reads pieces of files as documents, in the format that their suffix names."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from flatout.data.sources import BadRow, Document, Row
from flatout.data.sources.fields import Fields
from flatout.data.sources.input_file import Piece
from flatout.data.sources.local import suffix_of
from flatout.data.sources.long import decoded, measure
from flatout.data.sources.packed import (
    CANNOT_BE_READ,
    NotHandedOut,
    Unread,
    open_bytes,
    unreadable,
)
from flatout.data.sources.parquet import PARQUET_SUFFIXES, read_row_groups
from flatout.data.sources.rows import read_rows
from flatout.data.sources.tables import TABLE_SUFFIXES, read_table

LONG_BYTES = 8 << 20
"""A longer text file is read in chunks instead of being loaded into memory."""
ROW_SUFFIXES = {".jsonl", ".ndjson"}
_WITH_ROWS = ROW_SUFFIXES | PARQUET_SUFFIXES | TABLE_SUFFIXES | {".json"}
_CONVERTIBLE = {
    ".ipynb": ("a Jupyter notebook", "`jupyter nbconvert --to markdown FILE`"),
    ".rtf": ("an RTF document", "`pandoc FILE -t plain -o FILE.txt`"),
    ".docx": ("a Word document", "`pandoc FILE -t plain -o FILE.txt`"),
    ".odt": ("an OpenDocument text", "`pandoc FILE -t plain -o FILE.txt`"),
    ".epub": ("an EPUB book", "`pandoc FILE -t plain -o FILE.txt`"),
    ".pdf": ("a PDF", "`pdftotext FILE`"),
    **dict.fromkeys(
        (".html", ".htm", ".xhtml"), ("an HTML page", "`trafilatura < FILE.html > FILE.txt`")
    ),
    ".json": (
        "JSON",
        "`jq -c '.[]' FILE.json > FILE.jsonl` (if each line is an object, `mv FILE.json "
        "FILE.jsonl`)",
    ),
}
"""Unsupported formats by suffix, with a command that converts them to text or JSONL."""


def is_jsonl(name: str) -> bool:
    """Return whether a file of this name contains JSONL."""
    return suffix_of(name) in ROW_SUFFIXES


def is_parquet(name: str) -> bool:
    """Return whether a file of this name contains Parquet."""
    return suffix_of(name) in PARQUET_SUFFIXES


def holds_rows(name: str) -> bool:
    """Return whether a file of this name contains rows, also if it has to be converted first."""
    return suffix_of(name) in _WITH_ROWS


def read_pieces(pieces: tuple[Piece, ...], fields: Fields) -> Iterator[Row]:
    """Yield the rows of the pieces.

    A damaged piece is one bad row that counts the whole piece as lost: the true extent is unknown.

    Raises: DataError when a server or the system does not let flatout read a file, because the text
    is not at fault.
    """
    for piece in pieces:
        try:
            yield from _read(piece, fields)
        except Unread as error:
            unread_bytes = piece.num_bytes if holds_rows(piece.path) else 0
            yield BadRow.of(error, error.reason, piece.path, unread=unread_bytes)
        except (OSError, EOFError, zlib.error) as error:
            unread = unreadable(piece.path, error)
            if isinstance(unread, NotHandedOut):
                raise unread from error
            yield BadRow.of(unread, CANNOT_BE_READ, piece.path, unread=piece.num_bytes)


def _read(piece: Piece, fields: Fields) -> Iterable[Row]:
    """Return the rows of a piece, by its suffix. A file with an unknown suffix is text."""
    path, suffix = piece.path, suffix_of(piece.path)
    if suffix in PARQUET_SUFFIXES:
        return read_row_groups(piece, fields)
    if suffix in ROW_SUFFIXES:
        return read_rows(path, piece.start, piece.end or 0, fields)
    if suffix in TABLE_SUFFIXES:
        return read_table(path, suffix, fields)
    if suffix in _CONVERTIBLE:
        name, command = _CONVERTIBLE[suffix]
        fix = (
            f"Convert it, for example with {command}, and name the result, "
            "or skip such files with --on-bad-row skip."
        )
        return [BadRow(f"is {name}, not text", fix, f"{suffix} file", path)]
    return [read_text(path)]


def read_text(path: str) -> Row:
    """Return a text file as one document, without its byte order mark.

    Raises: NotUtf8.
    """
    with open_bytes(path) as file:
        data = file.read(LONG_BYTES + 1)
    return Document(measure(path) if len(data) > LONG_BYTES else decoded(data, path), path)
