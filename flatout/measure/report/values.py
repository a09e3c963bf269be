"""Numbers, times and text as HTML. Everything that comes from a run passes through `escape`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from flatout.json_io import is_finite

UNKNOWN = "–"
"""Shown for what was not measured."""
LONGEST_VALUE = 2_000
"""Characters of one value of a run that the page shows."""


def escape(text: object, *, longest: int = LONGEST_VALUE) -> str:
    """Return text for HTML, cut after `longest` characters; nothing in it is markup."""
    text = str(text)
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text):,} characters)"
    return html.escape(text)


def number(value: object, form: str = "") -> str:
    """Return a number in the format `form`, by default with four digits; UNKNOWN for anything else.

    Without `form`, whole numbers keep all their digits.
    """
    if not is_finite(value):
        return UNKNOWN
    if form:
        return format(value, form)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def time(seconds: object) -> str:
    """Return a duration: 3.2 s, 1 min 02 s, 2 h 05 min."""
    if not is_finite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plain(value: Any) -> str:
    """Return a value of a configuration or a finding as text."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, default=str, ensure_ascii=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Return a table that scrolls sideways; its cells are HTML, the first of a row its header."""
    header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">'
        f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )
