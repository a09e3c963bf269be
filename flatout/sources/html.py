"""HTML: its text, without markup, scripts and styles, paragraphs and preformatted text kept; takes
the package resiliparse.

Chosen because it is made for training corpora, keeps blocks apart, bounds the time that deeply
nested pages take, and is Apache-2.0.
"""

from __future__ import annotations

import importlib
from typing import Any

from flatout.errors import MissingPackage
from flatout.sources import Document, Row, RowLocation
from flatout.sources.encodings import open_utf8
from flatout.sources.fields import too_long
from flatout.sources.long import decoded

HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
PAGE_BYTES = 32 << 20
"""A page is parsed whole; a longer one is a bad row."""


def read_html(path: str, encoding: str | None) -> Row:
    """Return the text of a page as one document."""
    with open_utf8(path, encoding) as file:
        data = file.read(PAGE_BYTES + 1)
    if len(data) > PAGE_BYTES:
        return too_long(RowLocation(path), PAGE_BYTES)
    return Document(_package(path).extract_plain_text(decoded(data, path), alt_texts=False), path)


def require_html(path: str) -> None:
    """Do nothing when resiliparse is installed.

    Raises: MissingPackage with its install line.
    """
    _package(path)


def _package(path: str) -> Any:
    try:
        return importlib.import_module("resiliparse.extract.html2text")
    except ImportError as error:
        raise MissingPackage(
            f"Reading {path} takes the package resiliparse, which is not installed.",
            fix='Install it, `pip install "flatout[html]"`, or name files or patterns without it.',
        ) from error
