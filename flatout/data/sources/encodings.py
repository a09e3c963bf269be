"""Explains a file that is not UTF-8: what it seems to be, and the command that converts it."""

from __future__ import annotations

import codecs
from contextlib import suppress
from pathlib import Path

from flatout.data.sources.packed import open_bytes
from flatout.errors import in_shell
from flatout.storage.recognised import recognise
from flatout.storage.remote.urls import is_url

SAMPLE_BYTES = 2048
"""Bytes examined around the first byte that is not UTF-8."""
SHOWN_BYTES = 32
"""Bytes of these that a message shows."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Byte order marks. UTF-32 comes first because its mark starts with that of UTF-16."""
OR_SKIP = ", or skip such documents with --on-bad-row skip"
"""The end of a fix for which prepare's options apply."""


def explain(path: str, offset: int) -> tuple[str, str]:
    """Return what a file that is not UTF-8 at `offset` seems to be, and the fix."""
    unknown = "", converting(path, "ENCODING")
    if is_url(path):
        return unknown
    known = recognise(Path(path))
    if known is not None:
        return f". It is {known.name}", known.fix
    with suppress(OSError, EOFError, UnicodeDecodeError), open_bytes(path) as file:
        head = file.read(4)
        file.seek(max(offset - SAMPLE_BYTES // 2, 0))
        sample = file.read(SAMPLE_BYTES)
        file.seek(max(offset - SHOWN_BYTES // 2, 0))
        around = file.read(SHOWN_BYTES)
        mark = next((name for mark, name in _MARKS if head.startswith(mark)), None)
        if mark is not None:
            return f". It looks like {mark}", converting(path, mark)
        if b"\0" in sample:
            return ". It looks like a binary file", f"Name only text files{OR_SKIP}."
        sample.decode("cp1252")
        lines = around.decode("cp1252", "ignore").split("\n")
        line = max(lines, key=lambda line: sum(not each.isascii() for each in line)).strip()
        return f". As CP1252, it reads {line!r}", converting(path, "CP1252")
    return unknown


def converting(path: str, encoding: str) -> str:
    """Return the fix that converts a file from an encoding."""
    converted = in_shell(str(Path(path).with_suffix(f".utf8{Path(path).suffix}")))
    command = f"iconv -f {encoding} -t UTF-8 {in_shell(path)} > {converted}"
    return f"Convert it, for example with `{command}`, and name the new file{OR_SKIP}."
