"""Parses URLs, without contacting their servers."""

from __future__ import annotations

import re
import urllib.parse


def is_url(name: str) -> bool:
    """Return whether `name` is a URL such as `s3://bucket/key`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def protocol_of(url: str) -> str:
    """Return the protocol of a URL in lower case, `s3` for example."""
    return url.partition("://")[0].lower()


def is_local(url: str) -> bool:
    """Return whether a URL is a path on this machine, such as `file:///backup`."""
    return protocol_of(url) in ("file", "local")


def is_web(url: str) -> bool:
    """Return whether a URL is served over HTTP or HTTPS."""
    return protocol_of(url) in ("http", "https")


def name_in(url: str) -> str:
    """Return a path or URL unchanged. For a web URL, return only its path, without the query."""
    return urllib.parse.urlsplit(url).path if is_web(url) else url
