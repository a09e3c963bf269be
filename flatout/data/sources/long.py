"""Text too long for memory: it stays in its file and is read in chunks on demand."""

from __future__ import annotations

import codecs
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flatout.data.sources.packed import Unread, open_bytes, unreadable
from flatout.errors import DataError, in_shell
from flatout.storage.recognised import recognise
from flatout.storage.remote.urls import is_url

CHUNK_BYTES = 1 << 20
"""Bytes read at a time. A chunk of text has at most this many characters."""
_BYTE_ORDER_MARK = "\ufeff"
_HEAD = 4096
_TEXT_PER_NUL = 8
"""Text whose start has more than one NUL per eight characters is not read as UTF-8."""


class NotUtf8(Unread):
    """Bytes that are not UTF-8."""

    reason = "not UTF-8"


@dataclass(frozen=True, slots=True)
class LongText:
    """A range of a file's text that has a length and slices like a string.

    Slicing reads the slice to measure it.
    """

    path: str
    start: int
    """Index of its first character in the file, not counting a byte order mark."""
    stop: int
    """Index after its last character."""
    num_bytes: int
    """Its length in UTF-8 bytes."""
    sha256: bytes
    """SHA-256 of those bytes."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> LongText:
        start, stop, _ = part.indices(len(self))
        start, stop = self.start + start, self.start + stop
        return _measured(self.path, start, _read_again(self.path, start, stop))

    def first_bytes(self, limit: int) -> LongText:
        """Return the longest prefix of at most `limit` bytes of UTF-8."""
        characters = 0
        for chunk in self.chunks():
            data = chunk.encode()
            if len(data) >= limit:
                return self[: characters + len(data[:limit].decode(errors="ignore"))]
            characters += len(chunk)
            limit -= len(data)
        return self

    def chunks(self) -> Iterator[str]:
        """Return the chunks of the text, in order.

        Raises: DataError when the file cannot be read or has changed since it was measured.
        """
        return _read_again(self.path, self.start, self.stop)


Text = str | LongText

_last_utf8 = ("", b"")


def utf8(text: str, errors: str = "strict") -> bytes:
    """Return the UTF-8 of a text. `errors` is what `str.encode` does about surrogates.

    The last result is kept: packing hashes, measures and tokenises one document after another.
    """
    global _last_utf8
    last = _last_utf8  # another thread may replace it meanwhile
    if last[0] is not text:
        try:
            last = _last_utf8 = text, text.encode()
        except UnicodeEncodeError:
            return text.encode(errors=errors)
    return last[1]


def chunks_of(text: Text) -> Iterable[str]:
    """Return the chunks of a text. A short string is its own chunk."""
    if isinstance(text, LongText):
        return text.chunks()
    if len(text) <= CHUNK_BYTES:
        return (text,)
    return (text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES))


def measure(path: str) -> LongText:
    """Read a file once to measure its text, and return it as a LongText.

    Raises: NotUtf8; OSError, EOFError or zlib.error when the file cannot be read.
    """
    return _measured(path, 0, _decoded(path))


def _measured(path: str, start: int, chunks: Iterable[str]) -> LongText:
    characters = num_bytes = 0
    digest = hashlib.sha256()
    for chunk in chunks:
        data = chunk.encode()
        characters += len(chunk)
        num_bytes += len(data)
        digest.update(data)
    return LongText(path, start, start + characters, num_bytes, digest.digest())


def _read_again(path: str, start: int, stop: int) -> Iterator[str]:
    """Yield the characters [start, stop) of a file that was measured."""
    position = 0
    try:
        for chunk in _decoded(path):
            if position >= stop:
                return
            yield chunk[max(start - position, 0) : stop - position]
            position += len(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error
    if position < stop:
        raise DataError(
            f"{path} changed while it was being read.",
            fix="Stop the process that writes to it, and run the same command again.",
        )


def _decoded(path: str) -> Iterator[str]:
    """Yield the text of a file in chunks, without its byte order mark."""
    pending, offset, mark = b"", 0, _BYTE_ORDER_MARK
    with open_bytes(path) as file:
        while True:
            block = file.read(CHUNK_BYTES)
            data = pending + block
            try:
                text, used = codecs.utf_8_decode(data, "strict", not block)
            except UnicodeDecodeError as error:
                raise not_utf8(path, offset + error.start, data[error.start]) from error
            if text:
                if mark:
                    _require_text(path, text)
                yield text.removeprefix(mark)
                mark = ""
            if not block:
                return
            pending, offset = data[used:], offset + used


def decoded(data: bytes, path: str) -> str:
    """Return the text of a whole file, without its byte order mark.

    Raises: NotUtf8.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.start, data[error.start]) from error
    _require_text(path, text)
    return text.removeprefix(_BYTE_ORDER_MARK)


def _require_text(path: str, text: str) -> None:
    """Check that a file is not UTF-16 or UTF-32 without a byte order mark.

    ASCII in those encodings is valid UTF-8 with many NULs.

    Raises: NotUtf8.
    """
    head = text[:_HEAD]
    nuls = head.count("\0")
    if nuls * _TEXT_PER_NUL <= len(head):
        return
    wide = "UTF-32" if nuls * 2 > len(head) + 1 else "UTF-16"
    guess = wide + ("LE" if head[0] != "\0" else "BE")
    what = (
        f"{path} is not UTF-8 text: {nuls} of its first {len(head)} characters are NUL. "
        f"It looks like {guess}."
    )
    raise NotUtf8(what, fix=_conversion(path, guess))


def not_utf8(path: str, offset: int, byte: int) -> NotUtf8:
    """Return the error for a byte that is not UTF-8, with the command that converts the file."""
    what = f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset}"
    known = None if is_url(path) else recognise(Path(path))
    if known is not None:
        return NotUtf8(f"{what}. It is {known.name}.", fix=known.fix)
    has_mark = offset == 0 and byte in (0xFE, 0xFF)
    return NotUtf8(f"{what}.", fix=_conversion(path, "UTF-16" if has_mark else "CP1252"))


def _conversion(path: str, encoding: str) -> str:
    """Return the fix that converts a file from an encoding."""
    converted = in_shell(str(Path(path).with_suffix(f".utf8{Path(path).suffix}")))
    return (
        f"If it is {encoding}, convert it with `iconv -f {encoding} -t UTF-8 {in_shell(path)} > "
        f"{converted}` and name the new file, or skip such documents with --on-bad-row skip."
    )
