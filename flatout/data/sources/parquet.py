"""Parquet: one document per row, read by row group and column with the package pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from flatout.data.conversation.turns import CHAT_FIELDS
from flatout.data.sources import BadRow, Row
from flatout.data.sources.fields import ROW_BYTES, Fields, document, no_field, no_text, too_long
from flatout.data.sources.input_file import Piece
from flatout.data.sources.packed import (
    CANNOT_BE_READ,
    NotHandedOut,
    import_package,
    open_bytes,
    unreadable,
)
from flatout.storage.json_io import JsonObject

PARQUET_SUFFIXES = {".parquet"}
BATCH_ROWS = 256
BATCH_BYTES = 4 << 20
"""Rows are read in batches of up to BATCH_ROWS rows and about this many bytes."""
_PAGE_BYTES = 1 << 20
"""Bytes of a column read at a time, instead of the whole row group."""


def cut_parquet(path: str, size: int, fields: Fields, limit: int) -> list[Piece]:
    """Split a file into runs of row groups, each up to `limit` bytes of the requested columns.

    A file that is damaged or lacks a column is not split: reading it reports the problem.

    Raises: MissingPackage without pyarrow.
    """
    found: list[Piece] = []
    try:
        with open_bytes(path) as file:
            parquet = _open_parquet(path, file)
            columns = _columns_of(parquet, fields.among(parquet.schema_arrow.names))
    except _errors():
        columns = {}
    rows = 0
    for number in range(parquet.num_row_groups if columns and all(columns.values()) else 0):
        group = parquet.metadata.row_group(number)
        num_bytes = sum(chunk.total_uncompressed_size for chunk in _chunks(group, columns))
        last = found[-1] if found else None
        if last and last.num_bytes + num_bytes <= limit:
            found[-1] = replace(last, end=number + 1, num_bytes=last.num_bytes + num_bytes)
        else:
            found.append(Piece(path, number, number + 1, num_bytes, rows))
        rows += group.num_rows
    return found or [Piece(path, 0, None, size)]


def _columns_of(parquet: Any, fields: Fields) -> dict[str, list[int]]:
    """Return the numbers of the columns that each field consists of. A struct has several."""
    paths = [parquet.schema.column(number).path for number in range(len(parquet.schema))]
    return {
        field: [
            number
            for number, path in enumerate(paths)
            if path == field or path.startswith(f"{field}.")
        ]
        for field, _ in fields.named
    }


def _chunks(group: Any, columns: dict[str, list[int]]) -> list[Any]:
    """Return the column chunks of a row group that contain the fields."""
    return [group.column(number) for number in sorted({*chain(*columns.values())})]


def read_row_groups(groups: Piece, fields: Fields) -> Iterator[Row]:
    """Yield the rows of row groups. An unreadable file or rest of a row group is one bad row."""
    try:
        with open_bytes(groups.path) as file:
            parquet = _open_parquet(groups.path, file)
            names = parquet.schema_arrow.names
            fields = fields.among(names)
            columns = _columns_of(parquet, fields)
            for field, option in fields.named:
                if not columns[field]:
                    turns = next(filter(names.__contains__, CHAT_FIELDS), None)
                    if turns and option == "--text-field" and fields.chat is None:
                        yield no_text(groups.path, field, turns)
                    else:
                        yield no_field(groups.path, field, _text_columns(parquet), option)
                    return
            rows = groups.first_row
            for number in range(groups.start, groups.end or parquet.num_row_groups):
                yield from _read_row_group(parquet, number, rows, groups.path, fields)
                rows += parquet.metadata.row_group(number).num_rows
    except _errors() as error:
        yield _unread(groups.path, groups.path, error, groups.num_bytes)


def _text_columns(parquet: Any) -> list[str]:
    """Return the columns that contain one text per row, with dotted names inside structs."""
    columns = (parquet.schema.column(number) for number in range(len(parquet.schema)))
    return [
        column.path
        for column in columns
        if column.logical_type.type == "STRING" and not column.max_repetition_level
    ]


def _read_row_group(
    parquet: Any, group: int, first_row: int, path: str, fields: Fields
) -> Iterator[Row]:
    number = first_row
    described = parquet.metadata.row_group(group)
    chunks = _chunks(described, _columns_of(parquet, fields))
    num_bytes = max(sum(chunk.total_uncompressed_size for chunk in chunks), 1)
    try:
        at_once = min(BATCH_ROWS, max(BATCH_BYTES * described.num_rows // num_bytes, 1))
        names = [field for field, _ in fields.named]
        for batch in parquet.iter_batches(
            at_once, row_groups=[group], columns=names, use_threads=False
        ):
            for row in _rows_of(batch):
                number += 1
                where = f"{path}, row {number}"
                if row is None:
                    yield too_long(where, ROW_BYTES)
                elif isinstance(row, UnicodeDecodeError):
                    fix = "Write it again, or skip such rows with --on-bad-row skip."
                    yield BadRow(f"is not UTF-8: {row.reason}", fix, "not UTF-8", where)
                else:
                    yield document(row, fields, where)
    except _errors() as error:
        yield _unread(path, f"{path} after row {number}", error, num_bytes)


def _unread(path: str, where: str, error: Exception, num_bytes: int) -> BadRow:
    """Return the bad row for a damaged part, which counts as lost entirely.

    Raises: DataError when the system does not let flatout read the file.
    """
    if isinstance(unread := unreadable(path, error), NotHandedOut):
        raise unread from error
    message = " ".join(str(error).split()).rstrip(".")
    fix = "Check that the file is complete. --on-bad-row skip skips the unreadable rest."
    return BadRow(f"cannot be read: {message}", fix, CANNOT_BE_READ, where, unread_bytes=num_bytes)


def _rows_of(batch: Any) -> Iterator[JsonObject | UnicodeDecodeError | None]:
    """Yield the rows of a batch: an error for a row that is not UTF-8, None for one too long."""
    failed: UnicodeDecodeError | None = None
    if batch.nbytes <= ROW_BYTES:
        try:
            yield from batch.to_pylist()
            return
        except UnicodeDecodeError as error:
            failed = error
    if batch.num_rows == 1:
        yield failed
    else:
        for index in range(batch.num_rows):
            yield from _rows_of(batch.slice(index, 1))


def _open_parquet(path: str, file: Any) -> Any:
    return import_package("pyarrow.parquet", path, extra="parquet").ParquetFile(
        file, buffer_size=_PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises for a damaged file."""
    return (importlib.import_module("pyarrow").ArrowException, OSError, EOFError)


def require_parquet(path: str) -> None:
    """Check that pyarrow is installed.

    Raises: MissingPackage with the install line.
    """
    import_package("pyarrow", path, extra="parquet")
