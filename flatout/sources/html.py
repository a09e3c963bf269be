"""HTML: extracts the text of a page with resiliparse, without markup, scripts and styles.

resiliparse is made for training corpora, separates paragraphs from preformatted text, bounds the
time spent on deeply nested pages, and is licensed under Apache-2.0.
"""

from __future__ import annotations

from types import ModuleType

from flatout.sources import Document, Row
from flatout.sources.encodings import open_utf8
from flatout.sources.fields import too_long
from flatout.sources.long import decoded
from flatout.sources.packed import import_package

HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
PAGE_BYTES = 32 << 20
"""A page is parsed as a whole; a longer one is a bad row."""


def read_html(path: str, encoding: str | None) -> Row:
    """Return the text of a page as one document."""
    with open_utf8(path, encoding) as file:
        data = file.read(PAGE_BYTES + 1)
    if len(data) > PAGE_BYTES:
        return too_long(path, PAGE_BYTES)
    return Document(_package(path).extract_plain_text(decoded(data, path), alt_texts=False), path)


def require_html(path: str) -> None:
    """Check that resiliparse is installed.

    Raises: MissingPackage with its install line.
    """
    _package(path)


def _package(path: str) -> ModuleType:
    return import_package("resiliparse.extract.html2text", path, extra="html")
