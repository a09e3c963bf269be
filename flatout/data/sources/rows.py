"""JSONL: one document per row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import IO

from flatout.config.documents import parser_says
from flatout.data.sources import BadRow, Row, RowLocation
from flatout.data.sources.encodings import open_utf8
from flatout.data.sources.fields import ROW_BYTES, Fields, document, too_long
from flatout.data.sources.long import CHUNK_BYTES, not_utf8
from flatout.data.sources.packed import is_packed


def read_rows(
    path: str, start: int, end: int, fields: Fields, encoding: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a JSONL file that start in [start, end). Blank lines are skipped.

    A compressed file, or one in a different encoding, is read as a whole.

    Raises: WrongEncoding.
    """
    with open_utf8(path, encoding) as file:
        position, number = start, 0
        if position > 0:
            file.seek(position - 1)
            position += _skip_line(file) - 1
        whole = is_packed(path) or encoding is not None
        while whole or position < end:
            line = file.readline(ROW_BYTES + 1)
            if not line:
                return
            number += 1
            row: Row | None = None
            if len(line) > ROW_BYTES:
                row = too_long(RowLocation(path, position), ROW_BYTES)
                position += 0 if line.endswith(b"\n") else _skip_line(file)
            elif not line.isspace():
                row = _row(line, path, position, fields)
            if row is not None:  # offsets refer to the file only if it is UTF-8
                yield row if encoding is None else replace(row, location=f"{path}, line {number}")
            position += len(line)


def _skip_line(file: IO[bytes]) -> int:
    """Read to the end of the line and return the number of bytes read."""
    size = 0
    while piece := file.readline(CHUNK_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _row(line: bytes, path: str, offset: int, fields: Fields) -> Row:
    where = RowLocation(path, offset)
    try:
        row = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        bad = not_utf8(path, offset + error.start, line[error.start])
        return BadRow.of(bad, "not UTF-8", path, where)
    except json.JSONDecodeError as error:  # the location names the line
        what = f"is not JSON: {error.msg} at column {error.pos + 1}"
    except ValueError as error:
        what = f"is not JSON: {parser_says(error)}"
    except RecursionError:
        what = "is nested too deeply"
    else:
        return document(row, fields, where)
    fix = "Repair the line, or skip such rows with --on-bad-row skip."
    return BadRow(what, fix, "not JSON", where)
