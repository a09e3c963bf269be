"""JSONL: one document per row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from flatout.config.documents import parser_says
from flatout.data.sources import BadRow, Row, RowLocation
from flatout.data.sources.fields import ROW_BYTES, Fields, document, too_long
from flatout.data.sources.long import CHUNK_BYTES, not_utf8
from flatout.data.sources.packed import is_packed, open_bytes


def read_rows(path: str, start: int, end: int, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a JSONL file that start in [start, end). Blank lines are skipped.

    A compressed file is read as a whole.
    """
    with open_bytes(path) as file:
        position = start
        if position > 0:
            file.seek(position - 1)
            position += _skip_line(file) - 1
        whole = is_packed(path)
        while whole or position < end:
            line = file.readline(ROW_BYTES + 1)
            if not line:
                return
            if len(line) > ROW_BYTES:
                yield too_long(RowLocation(path, position), ROW_BYTES)
                position += 0 if line.endswith(b"\n") else _skip_line(file)
            elif not line.isspace():
                yield _row(line, path, position, fields)
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
