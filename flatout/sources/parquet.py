"""Parquet: one document per row, read by row group and column with the package pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from flatout.conversation.turns import CHAT_FIELDS
from flatout.json_io import JsonObject
from flatout.sources import BadRow, Row
from flatout.sources.fields import ROW_BYTES, Fields, document, no_field, no_text, too_long
from flatout.sources.packed import (
    CANNOT_BE_READ,
    NotHandedOut,
    import_package,
    open_bytes,
    unreadable,
)
from flatout.sources.parquet_pages import PAGE_BYTES, PAGE_RATIO, Page, pages_at

PARQUET_SUFFIXES = {".parquet"}
BATCH_ROWS = 256
BATCH_BYTES = 4 << 20
"""Rows are read in batches of up to BATCH_ROWS rows and about this many bytes."""
_PAGE_BYTES = 1 << 20
"""Bytes of a column read at a time, instead of the whole row group."""


@dataclass(frozen=True)
class RowGroups:
    """Row groups [start, end) of a file; `end` is None for a file that cannot be split."""

    path: str
    start: int
    end: int | None
    first_row: int
    """Number of rows before them."""
    num_bytes: int


def cut_parquet(path: str, size: int, fields: Fields, limit: int) -> list[RowGroups]:
    """Split a file into runs of row groups, each up to `limit` bytes of the requested columns.

    A file that is damaged or lacks a column is not split: reading it reports the problem.

    Raises: MissingPackage without pyarrow.
    """
    whole = [RowGroups(path, 0, None, 0, size)]
    try:
        with open_bytes(path) as file:
            described = _open_parquet(path, file).metadata
            names = [described.schema.column(index).path for index in range(described.num_columns)]
    except _errors():
        return whole
    requested = _requested(fields.among({name.partition(".")[0] for name in names}))
    if not all(any(_belongs_to(name, field) for name in names) for field in requested):
        return whole
    found: list[RowGroups] = []
    rows = 0
    for number in range(described.num_row_groups):
        group = described.row_group(number)
        num_bytes = _num_bytes(group, requested)
        if found and found[-1].num_bytes + num_bytes <= limit:
            found[-1] = replace(
                found[-1], end=number + 1, num_bytes=found[-1].num_bytes + num_bytes
            )
        else:
            found.append(RowGroups(path, number, number + 1, rows, num_bytes))
        rows += group.num_rows
    return found or whole


def _num_bytes(group: Any, requested: list[str]) -> int:
    """Return the uncompressed bytes of the requested fields in a row group."""
    return sum(column.total_uncompressed_size for column in _columns_of(group, requested))


def _columns_of(group: Any, requested: list[str]) -> list[Any]:
    """Return the column chunks of a row group that contain the requested fields."""
    columns = (group.column(index) for index in range(group.num_columns))
    return [
        column
        for column in columns
        if any(_belongs_to(column.path_in_schema, field) for field in requested)
    ]


def read_row_groups(groups: RowGroups, fields: Fields) -> Iterator[Row]:
    """Yield the rows of row groups; an unreadable file or rest of a row group is one bad row."""
    try:
        with open_bytes(groups.path) as file:
            parquet = _open_parquet(groups.path, file)
            fields = fields.among(parquet.schema_arrow.names)
            missing = _missing_field(parquet.schema_arrow, fields)
            if missing is not None:
                turns = next(filter(parquet.schema_arrow.names.__contains__, CHAT_FIELDS), None)
                yield (
                    no_text(groups.path, None, missing[0], turns)
                    if turns is not None and missing[2] == "--text-field" and fields.chat is None
                    else no_field(groups.path, None, *missing)
                )
                return
            rows = groups.first_row
            for group in range(
                groups.start, parquet.num_row_groups if groups.end is None else groups.end
            ):
                yield from _read_row_group(parquet, group, rows, groups.path, fields)
                rows += parquet.metadata.row_group(group).num_rows
    except _errors() as error:
        yield _unread(groups.path, groups.path, error, groups.num_bytes)


def _read_row_group(
    parquet: Any, group: int, first_row: int, path: str, fields: Fields
) -> Iterator[Row]:
    number = first_row
    described = parquet.metadata.row_group(group)
    num_bytes = max(_num_bytes(described, _requested(fields)), 1)
    try:
        pages = [
            page
            for column in _columns_of(described, _requested(fields))
            for page in pages_at(path, column)
        ]
        large = next((page for page in pages if page.is_too_large), None)
        if large is not None:
            yield _too_large(
                large, path if not first_row else f"{path} after row {first_row}", num_bytes
            )
            return
        at_once = min(
            [
                BATCH_ROWS,
                max(BATCH_BYTES * described.num_rows // num_bytes, 1),
                *(page.rows_in_bounds for page in pages),
            ]
        )
        for batch in parquet.iter_batches(
            at_once, row_groups=[group], columns=_requested(fields), use_threads=False
        ):
            for row in _dictionaries(batch):
                number += 1
                yield _row(row, fields, f"{path}, row {number}")
    except _errors() as error:
        yield _unread(path, f"{path} after row {number}", error, num_bytes)


def _too_large(page: Page, where: str, num_bytes: int) -> BadRow:
    """Return the bad row for the rows of a page that is too large to decompress."""
    what = (
        f"has a page of {page.packed_bytes / 1e6:,.2f} MB "
        f"that decompresses to {page.num_bytes / 1e6:,.0f} MB"
    )
    limit = f"the limit is {PAGE_BYTES >> 20} MiB, or {PAGE_RATIO} times the compressed size"
    fix = (
        "Write the file again with smaller pages or without compression, "
        "or skip these rows with --on-bad-row skip."
    )
    return BadRow(f"{what}; {limit}", fix, CANNOT_BE_READ, where, unread_bytes=num_bytes)


def _unread(path: str, where: str, error: Exception, num_bytes: int) -> BadRow:
    """Return the bad row for a damaged part, which counts as lost entirely.

    Raises: DataError when the system refuses to read the file.
    """
    if isinstance(unread := unreadable(path, error), NotHandedOut):
        raise unread from error
    message = " ".join(str(error).split()).rstrip(".")
    fix = "Check that the file is complete; --on-bad-row skip leaves out the unreadable rest."
    return BadRow(f"cannot be read: {message}", fix, CANNOT_BE_READ, where, unread_bytes=num_bytes)


def _requested(fields: Fields) -> list[str]:
    return [field for field, _ in fields.named]


def _row(row: JsonObject | UnicodeDecodeError | None, fields: Fields, where: str) -> Row:
    if row is None:
        return too_long(where, None, ROW_BYTES)
    if isinstance(row, UnicodeDecodeError):
        return BadRow(
            f"is not UTF-8: {row.reason}",
            "Write it again, or skip such rows with --on-bad-row skip.",
            "not UTF-8",
            where,
        )
    return document(row, fields, where)


def _dictionaries(batch: Any) -> Iterator[JsonObject | UnicodeDecodeError | None]:
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
            yield from _dictionaries(batch.slice(index, 1))


def _missing_field(schema: Any, fields: Fields) -> tuple[str, list[str], str] | None:
    """Return the first field without a column, the text columns and the field's option, or None."""
    names = list(_columns(schema))
    for field, option in fields.named:
        if not any(_belongs_to(name, field) for name, _ in names):
            return (
                field,
                [name for name, kind in names if kind in ("string", "large_string", "string_view")],
                option,
            )
    return None


def _columns(fields: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and type of every column, with dotted names inside structs."""
    for field in fields:
        yield f"{prefix}{field.name}", str(field.type)
        if str(field.type).startswith("struct<"):
            yield from _columns(field.type, f"{prefix}{field.name}.")


def _belongs_to(name: str, field: str) -> bool:
    return name == field or name.startswith(f"{field}.")


def _open_parquet(path: str, file: Any) -> Any:
    return _pyarrow(path, "pyarrow.parquet").ParquetFile(
        file, buffer_size=_PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises for a damaged file."""
    return (importlib.import_module("pyarrow").ArrowException, OSError, EOFError)


def require_parquet(path: str) -> None:
    """Check that pyarrow is installed.

    Raises: MissingPackage with the install line.
    """
    _pyarrow(path, "pyarrow")


def _pyarrow(path: str, module: str) -> ModuleType:
    return import_package(module, path, extra="parquet")
