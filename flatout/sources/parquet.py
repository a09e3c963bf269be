"""Parquet: a row a document, read by row groups and of the columns that are wanted alone; takes the
package pyarrow.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flatout.errors import MissingPackage
from flatout.sources import BadRow, Row, RowLocation
from flatout.sources.fields import ROW_BYTES, Fields, document, no_field, too_long
from flatout.sources.packed import CANNOT_BE_READ, NotHandedOut, open_bytes, unreadable
from flatout.sources.parquet_pages import PAGE_BYTES, PAGE_RATIO, Page, pages_at

PARQUET_SUFFIXES = {".parquet"}
BATCH_ROWS = 256
BATCH_BYTES = 4 << 20
"""Rows are taken from a row group so many, or about so much, at a time."""
_PAGE_BYTES = 1 << 20
"""A column is read so much at a time, not a row group at once."""


@dataclass(frozen=True)
class RowGroups:
    """Row groups [start, end) of a file, `end` None for all there are; one that cannot be read is
    such a whole.
    """

    path: str
    start: int
    end: int | None
    first_row: int
    """Rows before them."""
    num_bytes: int


def cut_parquet(path: str, size: int, fields: Fields, limit: int) -> list[RowGroups]:
    """Return a file's row groups, as many together as hold up to `limit` bytes of what is wanted;
    at least one.

    A file that is damaged or lacks a column is left whole: reading it says what is wrong.

    Raises: MissingPackage without pyarrow.
    """
    whole = [RowGroups(path, 0, None, 0, size)]
    try:
        with open_bytes(path) as file:
            described = _opened(path, file).metadata
            names = [described.schema.column(index).path for index in range(described.num_columns)]
    except _errors():
        return whole
    asked = _asked(fields)
    if not all(any(_inside(name, field) for name in names) for field in asked):
        return whole
    found: list[RowGroups] = []
    rows = 0
    for number in range(described.num_row_groups):
        group = described.row_group(number)
        num_bytes = _num_bytes(group, asked)
        if found and found[-1].num_bytes + num_bytes <= limit:
            found[-1] = replace(
                found[-1], end=number + 1, num_bytes=found[-1].num_bytes + num_bytes
            )
        else:
            found.append(RowGroups(path, number, number + 1, rows, num_bytes))
        rows += group.num_rows
    return found or whole


def _num_bytes(group: Any, asked: list[str]) -> int:
    """Return how much there is in a row group of the fields that are asked for."""
    return sum(column.total_uncompressed_size for column in _columns_of(group, asked))


def _columns_of(group: Any, asked: list[str]) -> list[Any]:
    """Return the column chunks of a row group that hold the fields that are asked for."""
    columns = (group.column(index) for index in range(group.num_columns))
    return [
        column
        for column in columns
        if any(_inside(column.path_in_schema, field) for field in asked)
    ]


def read_row_groups(groups: RowGroups, fields: Fields) -> Iterator[Row]:
    """Yield the rows of some row groups; where one cannot be read on, its rest is one bad row, and
    so is a file that cannot be read at all.
    """
    try:
        with open_bytes(groups.path) as file:
            parquet = _opened(groups.path, file)
            lacking = _lacking(parquet.schema_arrow, fields)
            if lacking is not None:
                yield no_field(RowLocation(groups.path), *lacking)
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
    num_bytes = max(_num_bytes(described, _asked(fields)), 1)
    try:
        pages = [
            page
            for column in _columns_of(described, _asked(fields))
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
            at_once, row_groups=[group], columns=_asked(fields), use_threads=False
        ):
            for row in _dictionaries(batch):
                number += 1
                yield _row(row, fields, f"{path}, row {number}")
    except _errors() as error:
        yield _unread(path, f"{path} after row {number}", error, num_bytes)


def _too_large(page: Page, where: str, num_bytes: int) -> BadRow:
    """Return the bad row for rows of which a page is packed so small and unpacks so large that it
    is not unpacked.
    """
    what = f"has a page that unpacks to {page.num_bytes / 1e6:,.0f} MB from {page.packed_bytes / 1e6:,.2f} MB"
    limit = f"at most {PAGE_BYTES >> 20} MiB, or {PAGE_RATIO} times its packed size, is unpacked"
    fix = "Write the file again with smaller pages or without compression, or skip these rows with --on-bad-row skip."
    return BadRow(f"{what}; {limit}", fix, CANNOT_BE_READ, where, unread_bytes=num_bytes)


def _unread(path: str, where: str, error: Exception, num_bytes: int) -> BadRow:
    """Return the bad row for what is damaged, and counts as lost whole.

    Raises: DataError when the system does not hand the file out.
    """
    if isinstance(unread := unreadable(path, error), NotHandedOut):
        raise unread from error
    said = " ".join(str(error).split()).rstrip(".")
    fix = "Check that the file is whole; --on-bad-row skip leaves out what cannot be read."
    return BadRow(f"cannot be read: {said}", fix, CANNOT_BE_READ, where, unread_bytes=num_bytes)


def _asked(fields: Fields) -> list[str]:
    return [field for field in (fields.text, fields.prompt) if field is not None]


def _row(row: dict[str, Any] | UnicodeDecodeError | None, fields: Fields, where: str) -> Row:
    if row is None:
        return too_long(RowLocation(where), ROW_BYTES)
    if isinstance(row, UnicodeDecodeError):
        return BadRow(
            f"is not UTF-8: {row.reason}",
            "Write it again, or skip such rows with --on-bad-row skip.",
            "not UTF-8",
            where,
        )
    return document(row, fields, where)


def _dictionaries(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError | None]:
    """Yield the rows of a batch; one whose bytes are not UTF-8 as the error, and None for one that
    is too long.
    """
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


def _lacking(schema: Any, fields: Fields) -> tuple[str, list[str], str] | None:
    """Return a field that the file has no column for, the columns that hold text, and the option
    that names it.
    """
    names = list(_columns(schema))
    for field, option in ((fields.text, "--text-field"), (fields.prompt, "--mask-field")):
        if field is not None and not any(_inside(name, field) for name, _ in names):
            return (
                field,
                [name for name, kind in names if kind in ("string", "large_string", "string_view")],
                option,
            )
    return None


def _columns(fields: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every column, those inside a structure by their dotted names, with its type."""
    for field in fields:
        yield f"{prefix}{field.name}", str(field.type)
        if str(field.type).startswith("struct<"):
            yield from _columns(field.type, f"{prefix}{field.name}.")


def _inside(name: str, field: str) -> bool:
    return name == field or name.startswith(f"{field}.")


def _opened(path: str, file: Any) -> Any:
    return _pyarrow(path, "pyarrow.parquet").ParquetFile(
        file, buffer_size=_PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _errors() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises for a file that is not whole."""
    return (importlib.import_module("pyarrow").ArrowException, OSError, EOFError)


def require_parquet(path: str) -> None:
    """Do nothing when pyarrow is installed.

    Raises: MissingPackage with its install line.
    """
    _pyarrow(path, "pyarrow")


def _pyarrow(path: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"Reading {path} takes the package pyarrow, which is not installed.",
            fix='Install it: `pip install "flatout[parquet]"`.',
        ) from error
