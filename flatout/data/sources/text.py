"""Text files and JSONL, read by ranges of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flatout.data.sources import BadRow, Document, Location, Row, RowLocation
from flatout.data.sources.fields import ROW_BYTES, Fields, document, too_long
from flatout.data.sources.packed import open_bytes
from flatout.errors import in_shell
from flatout.storage.recognised import recognise
from flatout.storage.remote.urls import is_url, name_in

TEXT_BYTES = ROW_BYTES
"""A longer text is several documents, so that no document takes much memory."""
CUT_BYTES = 1 << 16
"""Bytes after which a text is cut anywhere, if no line ends in them."""
_LINE_BYTES = 1 << 20
NOT_UTF8 = "not UTF-8"
"""Reason under which such rows are counted."""
_BYTE_ORDER_MARK = "\ufeff"
_HEAD = 4096
_UNPACKERS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}
_TEXT_PER_NUL = 8
"""Text whose start has more than one NUL per eight characters is not read as UTF-8."""


def read_text(path: str, start: int, end: int | None) -> Iterator[Row]:
    """Yield the documents of a text file that start in [start, end), a multiple of TEXT_BYTES.

    After every TEXT_BYTES, the text is cut at the next end of a line. Without an end, all of it is
    read. A byte order mark is not text.
    """
    with open_bytes(path) as file:
        position, rest = start, b""
        if start > 0:
            file.seek(start)
            rest = file.read(CUT_BYTES)
            position += (skipped := _cut(rest))
            rest = rest[skipped:]
        while end is None or start < end or start == 0:
            start += TEXT_BYTES
            data = rest + file.read(start + CUT_BYTES - position - len(rest))
            size = start - position
            stop = size + _cut(data[size:])
            if data or not position:
                yield _document(data[:stop], path, position)
            if len(data) <= size:
                return
            position, rest = position + stop, data[stop:]


def _cut(data: bytes) -> int:
    """Return where a text is cut: after the first end of a line, or at the first character."""
    line = data.find(b"\n", 0, CUT_BYTES) + 1
    return line or next((index for index in range(len(data[:4])) if data[index] & 0xC0 != 0x80), 0)


def _document(data: bytes, path: str, offset: int) -> Row:
    where = RowLocation(path, offset) if offset else path
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return not_utf8(path, where, offset, data, error.start)
    if wide := _wide_encoding(text):
        what = f"is not UTF-8 text. It looks like {wide}"
        return BadRow(what, _conversion(path, wide), NOT_UTF8, where)
    return Document(text if offset else text.removeprefix(_BYTE_ORDER_MARK), where)


def _wide_encoding(text: str) -> str:
    """Return the encoding of UTF-16 or UTF-32 that was read as UTF-8. Empty for other text.

    ASCII in those encodings is valid UTF-8 with many NULs.
    """
    head = text[:_HEAD]
    nuls = head.count("\0")
    if nuls * _TEXT_PER_NUL <= len(head):
        return ""
    wide = "UTF-32" if nuls * 2 > len(head) + 1 else "UTF-16"
    return wide + ("LE" if head[0] != "\0" else "BE")


def not_utf8(path: str, where: Location, offset: int, data: bytes, at: int) -> BadRow:
    """Return the bad row for byte `at` of `data`, at `offset` in a file, which is not UTF-8.

    Its fix converts the file, unless it is binary.
    """
    what = f"is not UTF-8: byte 0x{data[at]:02x} at offset {offset + at}"
    known = None if is_url(path) else recognise(Path(path))
    if known is not None:
        return BadRow(f"{what}. It is {known.name}", known.fix, NOT_UTF8, where)
    if offset == at == 0 and data[0] in (0xFE, 0xFF):
        encoding = "UTF-16"
    elif not (encoding := _wide_encoding(data[:_HEAD].decode("latin-1"))) and b"\0" in data:
        fix = "Name text only. Tokens are read with `flatout import` or `flatout.write_dataset`."
        return BadRow(f"{what}. It is a binary file", fix, NOT_UTF8, where)
    return BadRow(what, _conversion(path, encoding or "CP1252"), NOT_UTF8, where)


def _conversion(path: str, encoding: str) -> str:
    """Return the fix that converts a file from an encoding."""
    local = Path(name_in(path).rpartition("/")[2] if is_url(path) else path)
    command, plain = f"iconv -f {encoding} -t UTF-8 {in_shell(local)}", local
    if unpack := _UNPACKERS.get(local.suffix.lower()):
        plain = local.with_suffix("")
        command = f"{unpack} -dc {in_shell(local)} | iconv -f {encoding} -t UTF-8"
    converted = in_shell(str(plain.with_suffix(f".utf8{plain.suffix}")))
    return (
        f"If it is {encoding}, {'download it and ' * is_url(path)}convert it with `{command} > "
        f"{converted}` and name the new file, or skip such documents with --on-bad-row skip."
    )


def read_rows(path: str, start: int, end: int | None, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a JSONL file that start in [start, end). Blank lines are skipped.

    Without an end, all are read.
    """
    with open_bytes(path) as file:
        position = start
        if position > 0:
            file.seek(position - 1)
            position += _skip_line(file) - 1
        while end is None or position < end:
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
    while piece := file.readline(_LINE_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _row(line: bytes, path: str, offset: int, fields: Fields) -> Row:
    where = RowLocation(path, offset)
    try:
        row = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return not_utf8(path, where, offset, line, error.start)
    except json.JSONDecodeError as error:  # the location names the line
        what = f"is not JSON: {error.msg} at column {error.pos + 1}"
    except ValueError as error:
        what = f"is not JSON: {error}"
    except RecursionError:
        what = "is nested too deeply"
    else:
        return document(row, fields, where)
    fix = "Repair the line, or skip such rows with --on-bad-row skip."
    return BadRow(what, fix, "not JSON", where)
