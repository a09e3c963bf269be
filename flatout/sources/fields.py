"""Makes a document from the fields of a row, or a bad row when they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatout.errors import in_shell
from flatout.json_io import JsonObject
from flatout.registry import nearest
from flatout.sources import BadRow, Document, Row

ROW_BYTES = 8 << 20
"""A longer row is a bad row: memory holds several copies, with up to four bytes per character."""
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
    """The fields of a row that are read.

    `a.b` is the field `b` inside `a`, unless a field is called `a.b`.
    """

    text: str = "text"
    """The field with the text."""
    prompt: str | None = None
    """The field with preceding text that is excluded from the loss; null and empty: no prompt."""

    @property
    def named(self) -> list[tuple[str, str]]:
        """The fields that are read, each with the option that names it."""
        options = {"--text-field": self.text, "--mask-field": self.prompt}
        return [(field, option) for option, field in options.items() if field is not None]


def value_at(row: JsonObject, field: str) -> Any:
    """Return the value of a field: None inside a null, _MISSING when the row has no such field."""
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
    """Return the document of a row, or the bad row when a field is missing or not text."""
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
        return _unusable(row, text, name, offset, fields.text, "--text-field")
    if fields.prompt is None:
        return Document(text, name, offset)
    prompt = value_at(row, fields.prompt)
    if prompt is None or isinstance(prompt, str):
        return Document(text, name, offset, prompt or "")
    return _unusable(row, prompt, name, offset, fields.prompt, "--mask-field")


def no_field(name: str, offset: int | None, field: str, names: list[str], option: str) -> BadRow:
    """Return the bad row for a missing field; `names` are the candidates, most likely first."""
    guess = nearest(field, names) or (names[0] if names else None)
    fix = (
        f"Did you mean {option} {in_shell(guess)}?"
        if guess
        else f"Name the field that contains the text with {option}."
    )
    return BadRow(f"has no field {field!r}", fix, f"no field {field!r}", name, offset)


def too_long(name: str, offset: int | None, limit: int) -> BadRow:
    """Return the bad row for a row that is longer than `limit` bytes."""
    fix = (
        "Write its text to a separate text file, which may have any length, "
        "or skip such rows with --on-bad-row skip."
    )
    return BadRow(f"is longer than {limit >> 20} MiB", fix, "too long", name, offset)


def _unusable(
    row: JsonObject, value: Any, name: str, offset: int | None, field: str, option: str
) -> BadRow:
    if value is _MISSING:
        texts = dict(_texts(row))
        names = sorted(texts, key=lambda name: len(texts[name]), reverse=True)
        return no_field(name, offset, field, names, option)
    kind = _KINDS.get(type(value), type(value).__name__)
    fix = (
        f"Repair the row, name another field with {option}, "
        "or skip such rows with --on-bad-row skip."
    )
    return BadRow(
        f"has {field!r}, but it is {kind}, not text",
        fix,
        f"{field!r} is not text",
        name,
        offset,
    )


def _texts(row: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, str):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _texts(value, f"{prefix}{key}.")
