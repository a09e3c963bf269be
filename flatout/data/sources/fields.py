"""Makes a document from the fields of a row, or a bad row when they are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flatout.config.registry import nearest
from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.turns import (
    ALPACA_FIELDS,
    CHAT_FIELDS,
    COMPLETION,
    INSTRUCTION,
    MASK_FIELDS,
    OUTPUT,
    PROMPT,
    SYSTEM_FIELDS,
    TOOLS,
    BadConversation,
    read_conversation,
    turns_of_completion,
    turns_of_instruction,
)
from flatout.data.sources import BadRow, Document, Location, Row
from flatout.errors import DataError, in_shell
from flatout.storage.json_io import JsonObject

ROW_BYTES = 8 << 20
"""A longer row is a bad row: memory holds several copies, with up to four bytes per character."""
_MISSING = object()
_CHAT_FORMS = (
    "Name the field with the turns with --text-field. A prompt and its answer in two fields need "
    "no --chat, but --mask-field PROMPT --text-field ANSWER."
)
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
    """The field with the text, or with the turns of a conversation."""
    prompt: str | None = None
    """The field with preceding text that is excluded from the loss. Null or empty: no prompt."""
    chat: Renderer | None = None
    """Writes the turns as text, when rows are conversations."""
    beside: tuple[str, ...] = ()
    """Further fields of a conversation that rows have, such as tools or a system prompt."""
    is_stated: bool = False
    """Whether `text` is what the user wrote, even if it is the default."""

    @property
    def named(self) -> list[tuple[str, str]]:
        """The fields that are read, each with the option that names it."""
        named = [(self.text, "--text-field"), (self.prompt or "", "--mask-field")]
        return [each for each in named if each[0]] + [(field, "--chat") for field in self.beside]

    def among(self, names: Collection[str]) -> Fields:
        """Return the fields of rows that have fields of these names.

        Conversations are in the first of CHAT_FIELDS that there is, or in ALPACA_FIELDS, or in
        PROMPT and COMPLETION, unless the user names a field.
        """
        if self.chat is None or self.beside:
            return self
        beside = [TOOLS, *SYSTEM_FIELDS, *MASK_FIELDS]
        text = self.text
        if text == Fields.text and not self.is_stated:
            text = next(filter(names.__contains__, CHAT_FIELDS), CHAT_FIELDS[0])
            if text not in names and INSTRUCTION in names and OUTPUT in names:
                text = INSTRUCTION
                beside += ALPACA_FIELDS[1:]
            elif text not in names and PROMPT in names and COMPLETION in names:
                text = PROMPT
                beside.append(COMPLETION)
        return replace(self, text=text, beside=tuple(filter(names.__contains__, beside)))


TEXT_FIELD = Fields()
"""The fields that are read by default."""


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


def document(row: Any, fields: Fields, where: Location) -> Row:
    """Return the document of a row, or the bad row when a field is missing or not text."""
    if not isinstance(row, dict):
        fix = 'Write rows such as {"text": "..."}.'
        return BadRow("is not a JSON object", fix, "not an object", where)
    if fields.chat is not None:
        return _conversation(row, fields.among(row), fields.chat, where)
    text = value_at(row, fields.text)
    if not isinstance(text, str):
        return _unusable(row, text, where, fields.text, "--text-field")
    prompt = None if fields.prompt is None else value_at(row, fields.prompt)
    if prompt is None or isinstance(prompt, str):
        return Document(text, where, prompt or "")
    assert fields.prompt is not None
    return _unusable(row, prompt, where, fields.prompt, "--mask-field")


def _conversation(row: JsonObject, fields: Fields, chat: Renderer, where: Location) -> Row:
    """Return the rendered conversation of a row, or the bad row when there is none."""
    turns = value_at(row, fields.text)
    if turns is _MISSING:
        return replace(_no_field(where, fields.text, [], "--text-field"), fix=_CHAT_FORMS)
    try:
        if OUTPUT in fields.beside:
            turns = turns_of_instruction(row)
        elif COMPLETION in fields.beside:
            turns = turns_of_completion(row)
        examples = chat.examples(read_conversation(turns, row))
    except BadConversation as error:
        return BadRow(error.what, error.fix, error.reason, where)
    except DataError as error:
        what = f"cannot be rendered: {error.what.removesuffix('.')}"
        return BadRow(what, error.fix, "the chat template fails", where)
    return Document("".join(one.text for one in examples), where, examples=examples)


def _no_field(where: Location, field: str, names: list[str], option: str) -> BadRow:
    """Return the bad row for a missing field. `names` are the candidates, most likely first."""
    guess = nearest(field, names) or (names[0] if names else None)
    fix = f"Name the field that contains the text with {option}."
    if guess:
        fix = f"Did you mean {option} {in_shell(guess)}?"
    reason = f"no field {field!r}"
    return BadRow(f"has {reason}", fix, reason, where, other_field=guess)


def too_long(where: Location, limit: int) -> BadRow:
    """Return the bad row for a row that is longer than `limit` bytes."""
    fix = (
        "Write its text to a separate text file, which is cut where it is too long, "
        "or skip such rows with --on-bad-row skip."
    )
    return BadRow(f"is longer than {limit >> 20} MiB", fix, "too long", where)


def _unusable(row: JsonObject, value: Any, where: Location, field: str, option: str) -> BadRow:
    if value is _MISSING:
        usual = (*CHAT_FIELDS, COMPLETION)
        turns = next((key for key in row if key in usual and isinstance(row[key], list)), None)
        if turns is not None and option == "--text-field":
            what = f"has no field {field!r}, but a list called {turns!r}"
            fix = "If the rows are chat data, add --chat auto."
            return BadRow(what, fix, f"no field {field!r}", where)
        texts = dict(_texts(row))
        names = sorted(texts, key=lambda name: len(texts[name]), reverse=True)
        return _no_field(where, field, names, option)
    kind = _KINDS.get(type(value), type(value).__name__)
    fix = (
        f"Repair the row, name a different field with {option}, "
        "or skip such rows with --on-bad-row skip."
    )
    what = f"has {field!r}, but it is {kind}, not text"
    return BadRow(what, fix, f"{field!r} is not text", where)


def _texts(row: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, str):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _texts(value, f"{prefix}{key}.")
