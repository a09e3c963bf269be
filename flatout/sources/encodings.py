"""How a text that is not UTF-8 is probably encoded, and the command that converts it."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

from flatout.recognised import recognise
from flatout.sources.packed import is_packed, open_bytes
from flatout.sources.remote import is_address

SAMPLE_BYTES = 2048
"""So much text around the first byte that is not UTF-8 is looked at: more takes longer and hardly tells more."""
_MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""
_USUAL = "CP1252"
_NAMES = {
    "cp1252": _USUAL,
    "cp1250": "CP1250",
    "cp1251": "CP1251",
    "koi8_r": "KOI8-R",
    "cp1253": "CP1253",
    "cp1254": "CP1254",
    "cp932": "CP932",
    "euc_jp": "EUC-JP",
    "gb18030": "GB18030",
    "big5": "BIG5",
    "cp949": "CP949",
}
"""Encodings that are looked for, as Python and as iconv call them."""
OR_SKIP = ", or skip such documents with --on-bad-row skip"
"""What ends a fix where prepare's options are at hand."""


def explain(path: str, offset: int) -> tuple[str, str]:
    """Return what more is known of a file that is not UTF-8 from a byte on, `; it looks like CP1252`, and the fix."""
    known = None if is_address(path) else recognise(Path(path))
    if known is not None:
        return f"; it is {known.name}", known.fix
    encoding = None if is_address(path) else encoding_of(path, offset)
    if encoding is None:
        return "", f"Save it as UTF-8{OR_SKIP}."
    if encoding == "binary":
        return "; it looks like a binary file", f"Name files of text alone{OR_SKIP}."
    convert = f"iconv -f {encoding} -t UTF-8"
    if is_packed(path):
        return f"; it looks like {encoding}", f"Unpack it, convert it with `{convert} OLD > NEW`, and read that in its place{OR_SKIP}."
    new = Path(path).with_suffix(f".utf8{Path(path).suffix}")
    command = f"{convert} {shlex.quote(path)} > {shlex.quote(str(new))}"
    return f"; it looks like {encoding}", f"Convert it, `{command}`, and read that in its place{OR_SKIP}."


def encoding_of(path: str, offset: int) -> str | None:
    """Return the probable encoding of a file that is not UTF-8 from a byte on, as iconv calls it; `binary` for what is no text; None for no idea."""
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
        return "binary"
    from charset_normalizer import from_bytes

    best = from_bytes(sample, cp_isolation=list(_NAMES)).best()
    usual = _decoded(sample, "cp1252")
    if usual is not None and (best is None or usual == str(best)):
        return _USUAL
    return None if best is None else _NAMES.get(best.encoding)


def _decoded(sample: bytes, encoding: str) -> str | None:
    try:
        return sample.decode(encoding)
    except UnicodeDecodeError:
        return None
