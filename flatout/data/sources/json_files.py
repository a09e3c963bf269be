"""JSON: each object of an array or of a series of objects is a row. A single object is one row."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from flatout.config.documents import parser_says
from flatout.data.sources import Row
from flatout.data.sources.fields import ROW_BYTES, Fields, document
from flatout.data.sources.long import CHUNK_BYTES, not_utf8
from flatout.data.sources.packed import Unread, open_bytes

JSON_SUFFIXES = frozenset({".json"})
_BYTE_ORDER_MARK = "\ufeff"
_FIX = "Repair the file. --on-bad-row skip skips the unreadable rest."


def read_json(path: str, fields: Fields) -> Iterator[Row]:
    """Yield the rows of a JSON file of any length, read in pieces.

    Raises: Unread when the rest cannot be read.
    """
    with open_bytes(path) as file:
        for number, value in enumerate(_Json(path, file).values(), 1):
            yield document(value, fields, f"{path}, value {number}")


class _Json:
    """A JSON text, of which only the part needed for one value is in memory."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._offset = 0
        self._text = ""
        self._start = 0
        """Offset in the text of the next value."""
        self._ended = False

    def values(self) -> Iterator[Any]:
        """Yield the values of the array or, if there is none, of the file."""
        if self._next() != "[":
            while self._next():
                yield self._value()
            return
        self._start += 1
        if self._next() != "]":
            yield self._value()
            while self._next() == ",":
                self._start += 1
                yield self._value()
        if self._next() != "]":
            raise self._broken("a value of the array is followed by neither ',' nor ']'")
        self._start += 1
        if self._next():
            raise self._broken("there is more after the array")

    def _more(self) -> None:
        """Read another piece."""
        block = self._file.read(CHUNK_BYTES)
        self._ended = not block
        pending = self._decoder.getstate()[0]
        try:
            read = self._decoder.decode(block, self._ended)
        except UnicodeDecodeError as error:
            raise not_utf8(
                self._path,
                self._offset - len(pending) + error.start,
                (pending + block)[error.start],
            ) from error
        self._text = self._text[self._start :] + read
        self._offset += len(block)
        self._start = 0

    def _next(self) -> str:
        """Skip white space and return the next character, or an empty string at the end."""
        while True:
            while (
                character := self._text[self._start : self._start + 1]
            ).isspace() or character == _BYTE_ORDER_MARK:
                self._start += 1
            if character or self._ended:
                return character
            self._more()

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._start)
                if self._ended or end < len(self._text):  # otherwise a number may continue
                    self._start = end
                    return value
            except RecursionError as error:
                raise self._broken("it is nested too deeply") from error
            except ValueError as error:
                if not isinstance(error, json.JSONDecodeError):
                    raise self._broken(parser_says(error)) from error
                if self._ended:
                    raise self._broken(error.msg) from error
            if len(self._text) - self._start > ROW_BYTES:
                raise self._broken(f"a value is longer than {ROW_BYTES >> 20} MiB, or does not end")
            self._more()

    def _broken(self, why: str) -> Unread:
        return Unread(f"{self._path} cannot be read further as JSON: {why}.", fix=_FIX)
