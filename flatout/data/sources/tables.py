"""Tables, read with the package pyarrow: Parquet, CSV, and Arrow files. A row is a document."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any, NamedTuple

from flatout.data.sources import BadRow, Row, unread
from flatout.data.sources.fields import ROW_BYTES, Fields, document, too_long
from flatout.data.sources.listing import Piece, suffix_of
from flatout.data.sources.packed import import_package, open_bytes
from flatout.storage.json_io import JsonObject

PARQUET, ARROW = frozenset({".parquet"}), frozenset({".arrow", ".feather"})
CSV = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""Possible delimiters by suffix: the one that splits the first row into the most columns is used.
"""
TABLE_SUFFIXES = PARQUET | ARROW | CSV.keys()
BATCH_ROWS = 256
BATCH_BYTES = 4 << 20
"""Rows are converted in batches of up to BATCH_ROWS rows and about this many bytes."""
_PAGE_BYTES = 1 << 20
"""Bytes of a column of Parquet read at a time, instead of the whole row group."""
_HEADER_BYTES = 1 << 20


class _Part(NamedTuple):
    """A part of a table, beside which damage leaves the others readable."""

    batches: Iterable[Any]
    """Its rows, as pyarrow's batches. Of CSV, also the bad rows before them, by their numbers."""
    num_bytes: int
    """Approximate bytes of the columns that are read."""
    num_rows: int = 0
    """Its rows, when others follow."""


_Table = tuple[Any, Callable[[list[str]], Iterable[_Part]]]
"""The schema of a table, and a function that returns its parts, given the fields to read."""


def read_table(piece: Piece, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a table, or of row groups of Parquet.

    A file that cannot be read, or the rest of a row group, is one bad row.
    """
    path, suffix = piece.path, suffix_of(piece.path)
    opened = _parquet if suffix in PARQUET else _arrow if suffix in ARROW else _csv
    try:
        with open_bytes(path) as file:
            schema, parts = opened(piece, file)
            fields = fields.among(schema.names)
            named = [field for field, _ in fields.named]
            is_whole = {*named} <= _columns(schema)
            number = piece.first_row
            found = iter(parts(named if is_whole else schema.names))
            for part in found:
                rows = _rows(part, path, number, fields)
                for row in rows:
                    if not is_whole and isinstance(row, BadRow):  # as every row is
                        yield replace(row, location=path)
                        left = part.num_rows - 1 if part.num_rows else sum(1 for _ in rows)
                        left += sum(other.num_rows for other in found)
                        if left:
                            yield replace(row, location=f"{path}, all other rows", count=left)
                        return
                    yield row
                number += part.num_rows
    except _errors() as error:
        yield unread(path, path, error, piece.num_bytes)


def _columns(schema: Any, prefix: str = "") -> set[str]:
    """Return the names of all columns, and those of fields of a struct, with dots."""
    found: set[str] = set()
    for column in schema:
        found.add(prefix + column.name)
        if str(column.type).startswith("struct<"):
            found |= _columns(column.type, f"{prefix}{column.name}.")
    return found


def _rows(part: _Part, path: str, number: int, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a part, after row `number`."""
    omitted: set[int] = set()
    try:
        for batch in part.batches:
            if isinstance(batch, dict):
                omitted |= batch.keys()
                yield from batch.values()
                continue
            for row in _converted(batch):
                number += 1
                while number in omitted:
                    number += 1
                where = f"{path}, row {number}"
                if row is None:
                    yield too_long(where, ROW_BYTES)
                elif isinstance(row, UnicodeDecodeError):
                    fix = "Write it again as UTF-8, or skip such rows with --on-bad-row skip."
                    yield BadRow(f"is not UTF-8: {row.reason}", fix, "not UTF-8", where)
                else:
                    yield document(row, fields, where)
    except _errors() as error:
        yield unread(path, f"{path} after row {number}", error, part.num_bytes)


def _converted(batch: Any) -> Iterator[JsonObject | UnicodeDecodeError | None]:
    """Yield the rows of a batch: an error for a row that is not UTF-8, None for one too long."""
    rows = batch.num_rows
    failed: UnicodeDecodeError | None = None
    if batch.nbytes <= (min(BATCH_BYTES, ROW_BYTES) if rows > 1 else ROW_BYTES):
        try:
            yield from batch.to_pylist()
            return
        except UnicodeDecodeError as error:
            failed = error
    if rows == 1:
        yield failed
        return
    for half in (batch.slice(0, rows // 2), batch.slice(rows // 2)):
        yield from _converted(half)


def _parquet(piece: Piece, file: IO[bytes]) -> _Table:
    parquet = _open_parquet(piece.path, file)

    def parts(fields: list[str]) -> Iterator[_Part]:
        for number in range(piece.start, piece.end or parquet.num_row_groups):
            rows = parquet.metadata.row_group(number).num_rows
            num_bytes = _size(parquet, number, fields)
            at_once = min(BATCH_ROWS, max(BATCH_BYTES * rows // max(num_bytes, 1), 1))
            batches = parquet.iter_batches(
                at_once, row_groups=[number], columns=fields, use_threads=False
            )
            yield _Part(batches, num_bytes, rows)

    return parquet.schema_arrow, parts


def _open_parquet(path: str, file: IO[bytes]) -> Any:
    return import_package("pyarrow.parquet", path, extra="parquet").ParquetFile(
        file, buffer_size=_PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _size(parquet: Any, group: int, fields: Sequence[str]) -> int:
    """Return the bytes of a row group's columns that contain the fields."""
    described = parquet.metadata.row_group(group)
    chunks = map(described.column, range(described.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if any(f"{chunk.path_in_schema}.".startswith(f"{field}.") for field in fields)
    )


def cut_parquet(path: str, size: int, fields: Fields, limit: int) -> list[Piece]:
    """Split a file into runs of row groups, each up to `limit` bytes of the requested columns.

    A file that is damaged or lacks a column is not split: reading it reports the problem.

    Raises: MissingPackage without pyarrow.
    """
    found: list[Piece] = []
    rows = 0
    try:
        with open_bytes(path) as file:
            parquet = _open_parquet(path, file)
            named = [field for field, _ in fields.among(parquet.schema_arrow.names).named]
            is_whole = not {*named} <= _columns(parquet.schema_arrow)
            for number in range(0 if is_whole else parquet.num_row_groups):
                last, num_bytes = found[-1] if found else None, _size(parquet, number, named)
                if last and last.num_bytes + num_bytes <= limit:
                    found[-1] = replace(last, end=number + 1, num_bytes=last.num_bytes + num_bytes)
                else:
                    found.append(Piece(path, number, number + 1, num_bytes, rows))
                rows += parquet.metadata.row_group(number).num_rows
    except _errors():
        found = []
    return found or [Piece(path, 0, None, size)]


def _arrow(piece: Piece, file: IO[bytes]) -> _Table:
    """Return the table in an Arrow file, or in a stream, as the package datasets writes it."""
    ipc = import_package("pyarrow.ipc", piece.path, extra="parquet")
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = (ipc.open_file if is_file else ipc.open_stream)(file)

    def parts(fields: list[str]) -> list[_Part]:
        names = [
            name
            for name in reader.schema.names
            if any(f"{field}.".startswith(f"{name}.") for field in fields)
        ]
        batches = (
            map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        )
        return [_Part((batch.select(names) for batch in batches), piece.num_bytes)]

    return reader.schema, parts


def _csv(piece: Piece, file: IO[bytes]) -> _Table:
    """Return the table in a CSV or TSV file. Its first row names the columns."""
    arrow, reader = (
        import_package(name, piece.path, extra="parquet") for name in ("pyarrow", "pyarrow.csv")
    )
    with open_bytes(piece.path) as start:
        lines = re.split("\r\n|\r|\n", start.read(_HEADER_BYTES).decode("utf-8-sig", "replace"))
    blank = next((index for index, line in enumerate(lines) if line.strip()), 0)
    rows = [
        (delimiter, next(csv.reader([lines[blank]], delimiter=delimiter), []))
        for delimiter in CSV[suffix_of(piece.path)]
    ]
    delimiter, header = max(rows, key=lambda row: len(row[1]))
    names = [name.strip() for name in header]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise arrow.ArrowInvalid(f"two columns are called {twice!r}")
    bad: dict[int, BadRow] = {}
    counted = _Quotes(file)

    def omit(row: Any) -> str:
        number = row.number - blank - 1
        what = f"has {row.actual_columns} columns where the first row has {len(names)}"
        fix = "Repair the row, or skip such rows with --on-bad-row skip."
        bad[number] = BadRow(what, fix, "not CSV", f"{piece.path}, row {number}")
        return "skip"

    def batches(fields: list[str]) -> Iterator[Any]:
        last, read = None, {*fields, names[-1]}  # a quote may be open in the last column
        opened = reader.open_csv(
            counted,
            reader.ReadOptions(
                use_threads=False, block_size=ROW_BYTES, column_names=names, skip_rows=blank + 1
            ),
            reader.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=omit
            ),
            # as bytes, because text that is not UTF-8 would end the file
            reader.ConvertOptions(
                column_types=dict.fromkeys(read, arrow.binary()), include_columns=[*read]
            ),
        )
        for batch in opened:
            yield {number: bad.pop(number) for number in sorted(bad)}
            last = batch.slice(batch.num_rows - 1) if batch.num_rows else last
            yield batch.select(fields).cast(
                arrow.schema(dict.fromkeys(fields, arrow.string())), safe=False
            )
        values = last.to_pylist()[0].values() if last else ()
        if counted.number % 2 and any(b"\n" in (value or b"") for value in values):
            what = "has a quote that is not closed, so its last row takes the rest of the file"
            fix = 'Close it, and write a quote inside of quotes as "".'
            bad[sys.maxsize] = BadRow(what, fix, "not CSV", piece.path)
        yield bad

    has_rows = any(map(str.strip, lines[blank + 1 :]))
    schema = arrow.schema(dict.fromkeys(names if any(names) else [], arrow.string()))
    return schema, lambda fields: [_Part(batches(fields), piece.num_bytes)] if has_rows else []


class _Quotes:
    """A file that counts the quotes in what is read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.number = file, 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of the file."""
        block = self._file.read(size)
        self.number += block.count(b'"')
        return block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises for a damaged file."""
    return (importlib.import_module("pyarrow").ArrowException, OSError, EOFError)
