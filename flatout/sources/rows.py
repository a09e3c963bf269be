"""JSONL: a row a document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import IO

from flatout.sources import BadRow, Row, line_number
from flatout.sources.fields import ROW_BYTES, Fields, bad_row, document, too_long
from flatout.sources.long import CHUNK_BYTES, not_utf8
from flatout.sources.packed import is_packed, open_bytes
from flatout.sources.remote import is_address


def read_rows(path: str, start: int, end: int, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a JSONL file that begin in [start, end), all when it is packed; blank lines are no rows."""
    with open_bytes(path) as file:
        position = start
        if position > 0:
            file.seek(position - 1)
            position += _pass_line(file) - 1
        before = _counted(path, position)
        number = 0
        whole = is_packed(path)
        while whole or position < end:
            line = file.readline(ROW_BYTES + 1)
            if not line:
                return
            if len(line) > ROW_BYTES:
                yield too_long(_place(path, position, before, number), ROW_BYTES)
                position += 0 if line.endswith(b"\n") else _pass_line(file)
            elif not line.isspace():
                yield _row(line, path, position, fields, partial(_place, path, position, before, number))
            number += 1
            position += len(line)


def _pass_line(file: IO[bytes]) -> int:
    """Read up to the end of the line, and return how many bytes that was."""
    size = 0
    while piece := file.readline(CHUNK_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _counted(path: str, offset: int) -> Callable[[], int]:
    """Return what says the number of the line at a byte: counted once, and only when a row from there on is bad."""
    return cache(lambda: line_number(path, offset))


def _place(path: str, offset: int, before: Callable[[], int], number: int) -> str:
    return f"{path}, byte {offset}" if is_address(path) else f"{path}, line {before() + number}"


def _row(line: bytes, path: str, offset: int, fields: Fields, where: Callable[[], str]) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(where(), path, offset + error.start, line[error.start]), "not UTF-8", where())
    except ValueError as error:
        return bad_row(where(), "not JSON", f"is not JSON: {_complaint(error)}", "Repair the line, or skip such rows with --on-bad-row skip.")
    except RecursionError:
        return bad_row(where(), "not JSON", "is nested too deeply", "Repair the line, or skip such rows with --on-bad-row skip.")
    return document(row, fields, path, offset, where)


def _complaint(error: ValueError) -> str:
    """Return what the JSON parser says, with the place in the line alone: the line is named already."""
    return f"{error.msg} at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
