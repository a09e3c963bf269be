"""Text in encodings other than UTF-8: reads a named encoding, and guesses an unnamed one."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import suppress
from encodings import aliases
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

from flatout.config.registry import nearest
from flatout.data.sources.packed import Unread, converted, open_bytes
from flatout.errors import DataError
from flatout.storage.recognised import recognise
from flatout.storage.remote.urls import is_url

SAMPLE_BYTES = 2048
"""Bytes examined around the first byte that is not UTF-8. More rarely helps."""
SHOWN_BYTES = 32
"""Bytes of these that a message shows."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Byte order marks. UTF-32 comes first because its mark starts with that of UTF-16."""
_BLOCK = 1 << 18
_USUAL = "CP1252"
_GUESSED = [
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
"""Python's names of the encodings that can be guessed."""
_LATIN = {"cp1250", "cp1254"}
FEW_BYTES = 16
"""With fewer non-ASCII bytes, Latin encodings look alike, and the most common one is named."""
OR_SKIP = ", or skip such documents with --on-bad-row skip"
"""The end of a fix for which prepare's options apply."""
BINARY = "binary"
"""What `encoding_of` returns for a file that is not text."""


def explain(path: str, offset: int) -> tuple[str, str, str | None]:
    """Return what a non-UTF-8 file seems to be, the fix, and the encoding as of `encoding_of`."""
    known = None if is_url(path) else recognise(Path(path))
    if known is not None:
        return f". It is {known.name}", known.fix, None
    encoding = None if is_url(path) else encoding_of(path, offset)
    if encoding == BINARY:
        return ". It looks like a binary file", f"Name only text files{OR_SKIP}.", encoding
    if encoding is None:
        return "", f"Name its encoding, --encoding NAME{OR_SKIP}.", None
    return (
        f". It looks like {encoding}{_as_read(path, offset, encoding)}",
        f"Add --encoding {encoding}{OR_SKIP}.",
        encoding,
    )


def _as_read(path: str, offset: int, encoding: str) -> str:
    """Return the text around a byte as decoded in an encoding. Empty for UTF-16 and UTF-32."""
    if encoding.startswith("UTF"):
        return ""
    with open_bytes(path) as file:
        file.seek(max(offset - SHOWN_BYTES // 2, 0))
        around = file.read(SHOWN_BYTES)
    text = max(
        around.decode(encoding, "ignore").split("\n"),
        key=lambda line: sum(not character.isascii() for character in line),
    )
    return f", in which it reads {text.strip()!r}"


def codec_of(name: str | None) -> str | None:
    """Return Python's name for an encoding. None for UTF-8, the default.

    Raises: DataError with the nearest name when it is unknown.
    """
    if name is None:
        return None
    try:
        codec = codecs.lookup(name).name
        io.TextIOWrapper(io.BytesIO(), encoding=codec).close()  # some codecs are not for text
    except (LookupError, ValueError) as error:
        guess = nearest(name, sorted({*aliases.aliases, *aliases.aliases.values()} - {name}))
        hint = f"Did you mean {guess}? " if guess else ""
        raise DataError(
            f"--encoding {name!r} is not a text encoding that Python knows.",
            fix=f"{hint}Usual ones: {', '.join(map(_usual_name, _GUESSED))}.",
        ) from error
    return None if codec in ("utf-8", "utf-8-sig") else codec


class WrongEncoding(Unread):
    """Text that is not in the stated encoding."""

    reason = "not in the encoding"


def open_utf8(path: str, encoding: str | None) -> IO[bytes]:
    """Open a text file, compressed or not, as UTF-8, converted from `encoding` if given.

    A file that is valid UTF-8 and not pure ASCII is not converted. A converted file does not
    support seeking.

    Raises: as open_bytes; reading raises WrongEncoding when the text is not in that encoding.
    """
    if encoding is None or _is_utf8(path):
        return open_bytes(path)
    file = open_bytes(path)
    return converted(file, _as_utf8(path, file, encoding))


def _is_utf8(path: str) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    only_ascii = True
    with open_bytes(path) as file:
        try:
            while block := file.read(_BLOCK):
                only_ascii = decoder.decode(block).isascii() and only_ascii
            decoder.decode(b"", True)
        except UnicodeDecodeError:
            return False
    return not only_ascii


def _as_utf8(path: str, file: IO[bytes], encoding: str) -> Iterator[bytes]:
    """Yield the content of a file in a different encoding, as UTF-8.

    Raises: WrongEncoding.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    offset = 0
    for block in chain(iter(partial(file.read, _BLOCK), b""), [b""]):
        start, offset = offset - len(decoder.getstate()[0]), offset + len(block)
        try:
            yield decoder.decode(block, not block).encode()
        except UnicodeError as error:
            where = str(error)
            if isinstance(error, UnicodeDecodeError):
                where = f"byte 0x{error.object[error.start]:02x} at offset {start + error.start}"
            raise WrongEncoding(
                f"{path} is not {encoding}: {where}.",
                fix="Name a different --encoding. Without it, the error names a likely "
                f"one{OR_SKIP}.",
            ) from error


def encoding_of(path: str, offset: int) -> str | None:
    """Return the probable encoding of a file that is not UTF-8 at `offset`, BINARY or None."""
    try:
        with open_bytes(path) as file:
            head = file.read(4)
            file.seek(max(offset - SAMPLE_BYTES // 2, 0))
            sample = file.read(SAMPLE_BYTES)
    except (OSError, EOFError):
        return None
    mark = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if mark is not None:
        return mark
    if b"\0" in sample:
        return BINARY
    from charset_normalizer import from_bytes

    best = from_bytes(sample, cp_isolation=_GUESSED).best()
    usual = None
    with suppress(UnicodeDecodeError):
        usual = sample.decode("cp1252")
    unsure = (
        best is not None
        and best.encoding in _LATIN
        and sum(byte > 127 for byte in sample) < FEW_BYTES
    )
    if usual is not None and (best is None or usual == str(best) or unsure):
        return _USUAL
    return None if best is None else _usual_name(best.encoding)


def _usual_name(encoding: str) -> str:
    return encoding.upper().replace("_", "-")
