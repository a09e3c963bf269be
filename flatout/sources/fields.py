"""Which fields of a row make a document, and what is said of a row that lacks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatout.errors import in_shell
from flatout.registry import nearest
from flatout.sources import BadRow, Document, Row, RowLocation

ROW_BYTES = 8 << 20
"""A row is held whole while it is read, several times over and in up to four bytes a character; a
longer one is a bad row.
"""
_MISSING = object()
_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
}


@dataclass(frozen=True)
class Fields:
    """The fields of a row that are read. `a.b` is field `b` inside `a`, unless a field is called
    `a.b`.
    """

    text: str = "text"
    """Holds the text."""
    prompt: str | None = None
    """Holds what comes before the text and is not learned from; null and empty are no prompt."""


def value_at(row: dict[str, Any], field: str) -> Any:
    """Return the value of a field, None inside a null, or a mark of its own when there is no such
    field.
    """
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def document(row: Any, fields: Fields, name: str, offset: int | None = None) -> Row:
    """Return the document of the row of this name, or at this byte of this file; the bad row when a
    field is not as it should be.
    """
    if not isinstance(row, dict):
        return BadRow(
            "is not a JSON object",
            'Write rows such as {"text": "..."}.',
            "not an object",
            name,
            offset,
        )
    text = value_at(row, fields.text)
    if not isinstance(text, str):
        return _unusable(row, text, RowLocation(name, offset), fields.text, "--text-field")
    if fields.prompt is None:
        return Document(text, name, offset)
    prompt = value_at(row, fields.prompt)
    if prompt is None or isinstance(prompt, str):
        return Document(text, name, offset, prompt or "")
    return _unusable(row, prompt, RowLocation(name, offset), fields.prompt, "--mask-field")


def no_field(place: RowLocation, field: str, names: list[str], option: str) -> BadRow:
    """Return the bad row for a field that is not there; `names` are those that could be meant, the
    likeliest first.
    """
    guess = nearest(field, names) or (names[0] if names else None)
    fix = (
        f"Did you mean {option} {in_shell(guess)}?"
        if guess
        else f"Name the field that holds the text with {option}."
    )
    return BadRow(f"has no field {field!r}", fix, f"no field {field!r}", place.name, place.offset)


def too_long(place: RowLocation, limit: int) -> BadRow:
    """Return the bad row for one that is longer than may be held."""
    fix = "Write its text to a text file of its own, which may have any length, or skip such rows with --on-bad-row skip."
    return BadRow(f"is longer than {limit >> 20} MiB", fix, "too long", place.name, place.offset)


def _unusable(
    row: dict[str, Any], value: Any, place: RowLocation, field: str, option: str
) -> BadRow:
    if value is _MISSING:
        texts = dict(_texts(row))
        return no_field(
            place, field, sorted(texts, key=lambda name: len(texts[name]), reverse=True), option
        )
    kind = _KINDS.get(type(value), type(value).__name__)
    fix = f"Repair the row, name another field with {option}, or skip such rows with --on-bad-row skip."
    return BadRow(
        f"has {field!r}, but it is {kind}, not text",
        fix,
        f"{field!r} is not text",
        place.name,
        place.offset,
    )


def _texts(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, str):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _texts(value, f"{prefix}{key}.")
