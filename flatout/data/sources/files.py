"""Files, local or remote, compressed or not.

Text is one document per file, or several for a long one. JSONL and tables (Parquet, CSV, Arrow) are
one document per row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flatout.data.sources import FIRST_NAMED, BadRow, LeftOut, ReadTask, Row, unread
from flatout.data.sources.fields import TEXT_FIELD, Fields
from flatout.data.sources.listing import (
    InputFile,
    Piece,
    Wanted,
    find_files,
    fingerprint,
    full_suffix_of,
    suffix_of,
)
from flatout.data.sources.packed import import_package, is_packed, require_opener
from flatout.data.sources.tables import PARQUET, TABLE_SUFFIXES, cut_parquet, read_table
from flatout.data.sources.text import TEXT_BYTES, read_rows, read_text
from flatout.errors import DataError
from flatout.storage.remote.urls import is_url

PARTS, MIN_PART_BYTES = 64, 1 << 20
PART_BYTES = 4 << 20
"""Most bytes of rows in a task. Less of a corpus that has fewer than PARTS of these, so that many
cores share its work."""
REMOTE_PART_BYTES = 32 << 20
"""The same for remote files: each task reads up to a block too much, and Parquet's footer again."""
ROW_SUFFIXES = {".jsonl", ".ndjson"}
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex"}
_SEARCHED_SUFFIXES = TEXT_SUFFIXES | ROW_SUFFIXES | PARQUET
"""Suffixes searched for in a directory. A file named directly or by a pattern may have any."""
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
MOST_ASKED = 100
"""Files of which a row is read to see whether advice fits them all."""
FINGERPRINT_BYTES = 256 << 20
PARALLEL_FILES = 16
"""Files that are cut at the same time: listing row groups mostly waits for a server."""


def files(
    path: str,
    fields: Fields = TEXT_FIELD,
    include: Sequence[str] = (),
) -> list[ReadTask]:
    """Return the tasks of a file, a directory (searched recursively), a glob, or a URL of these.

    Files are sorted. `fields` are read of rows. `include` lists patterns of other names to read.

    Raises: DataError with the nearest name when nothing is there; MissingPackage.
    """
    found, skipped = find_files(path, Wanted(_SEARCHED_SUFFIXES, tuple(include)))
    first, *others = tasks_of(found, fields)
    return [replace(first, skipped=_count_skipped(skipped)), *others]


SOURCE = files


def tasks_of(found: Sequence[InputFile], fields: Fields) -> list[ReadTask]:
    """Return the tasks of files, in their order.

    Raises: MissingPackage; DataError when a file cannot be read.
    """
    for file in found:
        require_opener(file.path)
        if suffix_of(file.name) in TABLE_SUFFIXES:
            import_package("pyarrow", file.path, extra="parquet")
    per_file = max(4096, FINGERPRINT_BYTES // len(found))
    part_bytes = min(max(sum(file.size for file in found) // PARTS, MIN_PART_BYTES), PART_BYTES)

    def prepared(file: InputFile) -> tuple[InputFile, list[Piece]]:
        pieces = _cut(file, fields, part_bytes)
        if is_url(file.path):
            return file, pieces
        return replace(file, mark=fingerprint(Path(file.path), file.size, per_file)), pieces

    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        try:
            return list(_tasks(list(threads.map(prepared, found)), fields, part_bytes))
        except BaseException:  # an interrupt does not wait for the files that are left
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _count_skipped(skipped: Sequence[str]) -> tuple[LeftOut, ...]:
    """Return the skipped files, counted by suffix. The first few of each are named."""
    by_suffix: dict[str, list[str]] = {}
    for name in skipped:
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


def _cut(file: InputFile, fields: Fields, part_bytes: int) -> list[Piece]:
    suffix, size = suffix_of(file.name), file.size
    limit = REMOTE_PART_BYTES if is_url(file.path) else part_bytes
    if suffix in PARQUET:
        return cut_parquet(file.path, size, fields, limit)
    if is_packed(file.name) or suffix in TABLE_SUFFIXES or suffix in _CONVERTIBLE:
        return [Piece(file.path, 0, None, size * (3 if is_packed(file.name) else 1))]
    step = limit if suffix in ROW_SUFFIXES else TEXT_BYTES
    ends = [(start, min(start + step, size)) for start in range(0, max(size, 1), step)]
    return [Piece(file.path, start, end, end - start) for start, end in ends]


def _tasks(
    cut: list[tuple[InputFile, list[Piece]]], fields: Fields, part_bytes: int
) -> Iterator[ReadTask]:
    """Yield tasks of about `part_bytes`. A file's fingerprint is that of its first piece's task."""
    pieces: list[Piece] = []
    started: list[InputFile] = []
    num_bytes = 0

    def task() -> ReadTask:
        marks = "\n".join(f"{file.name} {file.size} {file.mark}" for file in started)
        return ReadTask(read_pieces, (tuple(pieces), fields), marks, num_bytes, tuple(started))

    for file, of_file in cut:
        for index, piece in enumerate(of_file):
            if pieces and num_bytes + piece.num_bytes > part_bytes:
                yield task()
                pieces, started, num_bytes = [], [], 0
            pieces.append(piece)
            num_bytes += piece.num_bytes
            if index == 0:
                started.append(file)
    yield task()


def advised(error: DataError, found: Sequence[InputFile]) -> DataError:
    """Return the error for a row, whose fix suggests no field that the rows of other files lack."""
    field = getattr(error, "other_field", "")
    for file in found[:MOST_ASKED] if field else ():
        pieces = (Piece(file.path, 0, None, file.size),) if holds_rows([file]) else ()
        row = next(read_pieces(pieces, Fields(field)), None)
        if isinstance(row, BadRow) and row.reason == f"no field {field!r}":
            fix = f"Name a field that all files have: {file.path} has no {field!r}. "
            fix += "Or prepare these files separately, and train on both with data.mix."
            return DataError(error.what, fix=fix)
    return error


def holds_rows(found: Iterable[InputFile]) -> bool:
    """Return whether one of the files contains rows by its name, or once it is converted."""
    with_rows = ROW_SUFFIXES | TABLE_SUFFIXES | {".json"}
    return any(suffix_of(file.name) in with_rows for file in found)


def read_pieces(pieces: tuple[Piece, ...], fields: Fields) -> Iterator[Row]:
    """Yield the rows of the pieces.

    A damaged piece is one bad row that counts the whole piece as lost: the true extent is unknown.

    Raises: DataError when a server or the system does not let flatout read a file, because the text
            is not at fault.
    """
    for piece in pieces:
        try:
            yield from _read(piece, fields)
        except (OSError, EOFError, zlib.error) as error:
            yield unread(piece.path, piece.path, error, piece.num_bytes)


def _read(piece: Piece, fields: Fields) -> Iterable[Row]:
    """Return the rows of a piece, by its suffix. A file with an unknown suffix is text."""
    path, suffix = piece.path, suffix_of(piece.path)
    if suffix in TABLE_SUFFIXES:
        return read_table(piece, fields)
    if suffix in ROW_SUFFIXES:
        return read_rows(path, piece.start, piece.end, fields)
    if suffix in _CONVERTIBLE:
        name, command = _CONVERTIBLE[suffix]
        fix = (
            f"Convert it, for example with {command}, and name the result, "
            "or skip such files with --on-bad-row skip."
        )
        return [BadRow(f"is {name}, not text", fix, f"{suffix} file", path)]
    return read_text(path, piece.start, piece.end)
