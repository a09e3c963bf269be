"""Reads the decompressed sizes of the pages of a Parquet column from the page headers.

pyarrow decompresses a page as a whole, whatever its size, and the footer does not list the sizes:
only the headers bound the memory for reading. A header is a struct in Thrift's compact encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from flatout.data.sources.packed import Damaged, is_packed
from flatout.storage.remote.urls import is_url

PAGE_BYTES = 64 << 20
"""A page that decompresses to at most this size is always accepted."""
PAGE_RATIO = 32
"""A larger page is accepted up to this multiple of its compressed size: text seldom reaches 10."""
_DICTIONARY = 2
"""The type of a page that contains the values of a dictionary."""


@dataclass(frozen=True)
class Page:
    """A page of a column, as described by its header."""

    num_bytes: int
    """Its decompressed size."""
    packed_bytes: int
    """Its size in the file."""
    num_values: int
    is_dictionary: bool

    @property
    def is_too_large(self) -> bool:
        """Whether decompressing it would take far more memory than its compressed size suggests."""
        return self.num_bytes > max(PAGE_BYTES, PAGE_RATIO * self.packed_bytes)

    @property
    def rows_in_bounds(self) -> int:
        """Rows of such pages that fit a batch without exceeding PAGE_BYTES by much."""
        # In every row the value may be as long as the whole dictionary.
        values = 1 if self.is_dictionary else self.num_values
        return max(PAGE_BYTES * values // max(self.num_bytes, 1), 1)


def pages_at(path: str, column: Any) -> list[Page]:
    """Return the pages of one column chunk of a file.

    In remote and compressed files, where reading the headers would read everything twice, the chunk
    is described as a single page.

    Raises: Damaged when the bytes are not page headers; OSError.
    """
    if is_url(path) or is_packed(path):
        return [
            Page(
                column.total_uncompressed_size,
                column.total_compressed_size,
                column.num_values,
                column.has_dictionary_page,
            )
        ]
    with open(path, "rb") as file:
        return list(_pages_of(file, column))


def _pages_of(file: IO[bytes], column: Any) -> Iterator[Page]:
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        start = min(start, column.dictionary_page_offset)
    offset, end = start, start + column.total_compressed_size
    while offset < end:
        file.seek(offset)
        try:
            header = _struct(file)
            kind, num_bytes, packed_bytes = (int(header[field]) for field in (1, 2, 3))
            described: dict[int, Any] = next(
                (header[field] for field in (5, 7, 8) if field in header), {}
            )
            page = Page(num_bytes, packed_bytes, int(described.get(1, 0)), kind == _DICTIONARY)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Damaged(f"there is no page header at byte {offset}") from error
        if num_bytes < 0 or packed_bytes < 0:
            raise Damaged(f"the page at byte {offset} has a negative size")
        yield page
        offset = file.tell() + packed_bytes


def _struct(file: IO[bytes]) -> dict[int, Any]:
    """Read a struct: its fields by number."""
    fields: dict[int, Any] = {}
    number = 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _signed(file)
        fields[number] = _value(file, head & 15)
    return fields


def _value(file: IO[bytes], kind: int, *, inside: bool = False) -> Any:
    """Read a value of the given type. Values that cannot contain a size are skipped.

    A boolean is encoded in the type of a field, and as a byte `inside` a list.
    """
    if kind in (1, 2):
        return _byte(file) if inside else kind
    if kind == 3:
        return _byte(file)
    if kind in (4, 5, 6):
        return _signed(file)
    if kind in (7, 8):
        return file.seek(8 if kind == 7 else _unsigned(file), 1)
    if kind in (9, 10):
        head = _byte(file)
        for _ in range(_unsigned(file) if head >> 4 == 15 else head >> 4):
            _value(file, head & 15, inside=True)
        return None
    if kind == 12:
        return _struct(file)
    raise Damaged(f"{kind} is not a type of a page header's fields")


def _byte(file: IO[bytes]) -> int:
    found = file.read(1)
    if not found:
        raise EOFError("it is truncated")
    return found[0]


def _unsigned(file: IO[bytes]) -> int:
    value = shift = 0
    while (byte := _byte(file)) & 0x80 and shift < 63:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value | byte << shift


def _signed(file: IO[bytes]) -> int:
    value = _unsigned(file)
    return value >> 1 ^ -(value & 1)
