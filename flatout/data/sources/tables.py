"""CSV and TSV: one document per row, with fields named by the first row."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import IO

from flatout.data.sources import BadRow, Row
from flatout.data.sources.fields import ROW_BYTES, Fields, document
from flatout.data.sources.long import not_utf8
from flatout.data.sources.packed import Unread, open_bytes

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""Possible delimiters by suffix: the one that splits the first row into the most columns is used.
"""
TABLE_SUFFIXES = frozenset(_DELIMITERS)
_AFTER_CR = re.compile(rb"(?<=\r)(?!\n)")
"""Where a line ends without a line feed, as in files of old spreadsheets."""


def read_table(path: str, suffix: str, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a table. Blank lines are skipped.

    Raises: Unread when the rest cannot be read.
    """
    csv.field_size_limit(max(csv.field_size_limit(), ROW_BYTES))
    with open_bytes(path) as file:
        lines = _Lines(path, file)
        first = next((line for line in lines if not line.isspace()), "")
        if lines.fault is not None:
            raise not_utf8(path, *lines.fault)
        delimiter = max(
            _DELIMITERS[suffix],
            key=lambda delimiter: len(next(csv.reader([first], delimiter=delimiter), [])),
        )
        rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            lines.begin_row()
            where = f"{path}, line {lines.first}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                if not header:
                    fix = "Check that the first row names the columns."
                    raise Unread(f"{path} is not CSV: {error}.", fix=fix) from error
                several = lines.number > lines.first  # an unclosed quote swallows the rows after it
                yield _bad(f"is not CSV: {error}", where, lines.row_bytes if several else 0)
                continue
            if row is None:
                return
            if not header:
                header = [name.strip() for name in row]
                twice = next((name for name in header if header.count(name) > 1), None)
                if twice is not None:
                    fix = "Give each column a unique name in the first row."
                    raise Unread(f"{path} has two columns called {twice!r}.", fix=fix)
            elif lines.fault is not None:
                yield BadRow.of(not_utf8(path, *lines.fault), "not UTF-8", path, where)
            elif row and len(row) != len(header):
                yield _bad(f"has {len(row)} columns where the first row has {len(header)}", where)
            elif row:
                found = document(dict(zip(header, row, strict=True)), fields, where)
                if isinstance(found, BadRow) and fields.text not in header:
                    found = replace(found, what=f"{found.what}: the first row names the columns")
                yield found


def _bad(what: str, where: str, unread_bytes: int = 0) -> BadRow:
    fix = "Repair the row, or skip such rows with --on-bad-row skip."
    return BadRow(what, fix, "not CSV", where, unread_bytes)


class _Lines:
    """Reads the lines of a file and counts them."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._offset = 0
        self._waiting: deque[bytes] = deque()
        """Lines that were read, after the last one returned."""
        self._rest = b""
        """The start of a line whose end was not read."""
        self.number = 0
        """Number of the last line read, counted from 1."""
        self.begin_row()

    def begin_row(self) -> None:
        """Reset the record of the current row: the next line starts a new one."""
        self.first = self.number + 1
        """First line of the row."""
        self.row_bytes = 0
        """Bytes of the row read so far."""
        self.fault: tuple[int, int] | None = None
        """Offset and value of the row's first byte that is not UTF-8."""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if not self._waiting:
            block = self._rest + self._file.readline(ROW_BYTES + 1)
            self._waiting.extend(filter(None, _AFTER_CR.split(block)))
            has_more = len(self._waiting) > 1 and not block.endswith(b"\n")
            self._rest = self._waiting.pop() if has_more else b""
        line = self._waiting.popleft() if self._waiting else b""
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > ROW_BYTES:
            raise Unread(
                f"{self._path}, line {self.number} is longer than {ROW_BYTES >> 20} MiB.",
                fix="Check that the file is CSV or TSV.",
            )
        start, self._offset = self._offset, self._offset + len(line)
        self.row_bytes += len(line)
        try:
            return line.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            self.fault = self.fault or (start + error.start, line[error.start])
            return line.decode(errors="replace")
