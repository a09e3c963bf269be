"""Reads the turns of a conversation from a row in the form of OpenAI, ShareGPT, Alpaca or TRL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.errors import DataError

if TYPE_CHECKING:
    from flatout.storage.json_io import JsonObject

CHAT_FIELDS = ("messages", "conversations")
"""Fields of a row that contain its turns, unless a different one is named."""
TOOLS = "tools"
"""Field of a row with the descriptions of the tools that its assistant may call."""
SYSTEM = "system"
SYSTEM_FIELDS = (SYSTEM, "system_prompt")
"""Fields of a row with its system prompt, if that is not a turn."""
INSTRUCTION, OUTPUT = "instruction", "output"
ALPACA_FIELDS = (INSTRUCTION, "input", OUTPUT, "history")
"""Fields of a row that is one question with its answer, after earlier ones."""
PROMPT, COMPLETION = "prompt", "completion"
"""Fields of a row with its turns in two lists. The loss counts none of the first."""
ASSISTANT = "assistant"
START, STOP, GUARD = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters in rendered text: around `{% generation %}` blocks, and inside names of special
tokens that the text of a turn contains.
"""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names of roles, and what templates call them."""
_KNOWN = "system, user, assistant or tool"
_ASKS = ("loss", "train", "training", "trainable")
"""Fields of a turn that ask the loss to count it if they are 1."""
_FLAGS = {"weight": 1, "loss_weight": 1, **dict.fromkeys(_ASKS, 1), "masked": 0}
"""Fields of a turn that state whether the loss counts it, with the value for yes."""
_UNCLEAR = {
    "mask": "in some files 1 includes a turn, and in others it excludes one",
    "loss_mask": "it selects tokens, or turns, and files differ in which",
    "ignore": "in some files it excludes a turn from the loss, and in others from the text",
    "train_detail": "it selects parts of a turn, and a turn counts in full or not at all",
}
"""Such fields that are not read, and why."""
MASK_FIELDS = (*_FLAGS, *_UNCLEAR)
"""Fields that may exclude text from the loss. Beside the turns or in parts of one, none may."""
_SCHEMA_VALUES = ("default", "const")
"""Keys of the schema of a tool whose null is a value."""
_REPAIR = "Repair the row, or skip such rows with --on-bad-row skip."


class BadConversation(DataError):
    """A conversation cannot be used. `reason` is the short form under which it is counted."""

    def __init__(self, what: str, *, fix: str = _REPAIR, reason: str) -> None:
        super().__init__(what, fix=fix)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """The turns of a conversation, as a chat template takes them."""

    messages: tuple[JsonObject, ...]
    """One per turn: `role`, `content`, and what else the row states, such as `tool_calls`."""
    targets: tuple[bool, ...]
    """Whether the loss counts a turn: the assistant's, unless a field such as `weight` says no."""
    tools: list[Any] | None = None
    """Descriptions of the tools that the assistant may call."""


def read_conversation(value: Any, row: JsonObject | None = None) -> Conversation:
    """Return the conversation in a list of `{role, content}` or `{from, value}` objects.

    `row` may state tools and a system prompt beside it.

    Raises: BadConversation, whose message continues a sentence that starts with the row.
    """
    if not isinstance(value, list) or not value:
        raise BadConversation("has no list of turns", reason="no turns")
    row = row or {}
    for field in MASK_FIELDS:
        stated, yes = row.get(field), (_FLAGS | {"loss_mask": 1}).get(field)
        if stated is not None and stated != yes:
            raise _misplaced(field, "beside the turns")
    messages, targets = [], []
    for number, turn in enumerate(value, 1):
        message = _message(turn, f"turn {number}")
        targets.append(_counts(message, f"turn {number}"))
        for field in MASK_FIELDS:
            message.pop(field, None)
        messages.append(message)
    if not any(targets):
        silent = any(message["role"] == ASSISTANT for message in messages)
        found = "only assistant turns that are excluded" if silent else "no assistant turn"
        raise BadConversation(
            f"has {found}, so nothing in it would count towards the loss", reason=found
        )
    for field in SYSTEM_FIELDS:
        system = row.get(field)
        if system is None or system == "":
            continue
        if not isinstance(system, str):
            raise BadConversation(f"has a {field!r} that is not text", reason="bad system prompt")
        if messages[0]["role"] != SYSTEM:
            messages.insert(0, {"role": SYSTEM, "content": system})
            targets.insert(0, False)
        elif messages[0]["content"] != system:
            raise BadConversation(
                f"has a {field!r} and a first turn that are different system prompts",
                reason="two system prompts",
            )
    tools = _tools(_without_nulls(row.get(TOOLS), _SCHEMA_VALUES))
    return Conversation(tuple(messages), tuple(targets), tools)


def turns_of_instruction(row: JsonObject) -> list[JsonObject]:
    """Return the turns of a row in Alpaca's form. A blank line precedes its `input`.

    Raises: BadConversation when `history` is not a list of questions with their answers.
    """
    history = row.get("history") or []
    pairs = history if isinstance(history, list) else [None]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise BadConversation("has a 'history' that is not a list of pairs", reason="bad history")
    question = row[INSTRUCTION]
    if isinstance(question, str) and isinstance(row.get("input"), str) and row["input"].strip():
        question = f"{question}\n\n{row['input']}" if question else row["input"]
    return [
        {"role": role, "content": content}
        for pair in [*pairs, (question, row[OUTPUT])]
        for role, content in zip(("user", ASSISTANT), pair, strict=True)
    ]


def turns_of_completion(row: JsonObject) -> list[Any]:
    """Return the turns of a row in TRL's form, with weight 0 for those of the prompt.

    Raises: BadConversation when its two fields are not lists.
    """
    prompt, completion = row[PROMPT], row[COMPLETION]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadConversation(
            f"has a {PROMPT!r} and a {COMPLETION!r} that are not both lists of turns",
            fix=f"Read text with --mask-field {PROMPT} --text-field {COMPLETION}, without --chat.",
            reason="no turns",
        )
    before = [turn | {"weight": 0} if isinstance(turn, dict) else turn for turn in prompt]
    return before + completion


def _counts(message: JsonObject, which: str) -> bool:
    """Return whether the loss counts a turn, by its role and fields such as `weight`.

    Raises: BadConversation for a field that is not 0 or 1, or whose meaning is unclear.
    """
    if message["role"] != ASSISTANT:
        for field in filter(message.get, _ASKS):
            raise BadConversation(
                f"has {field!r} in {which}, but only assistant turns count in the loss",
                fix="Remove it, or skip such rows with --on-bad-row skip.",
                reason=f"{field!r} in a turn that is not the assistant's",
            )
        return False
    for field, why in _UNCLEAR.items():
        if field in message:
            raise BadConversation(
                f"has {field!r} in {which}, which is not read: {why}",
                fix='Write "weight": 0 in turns that the loss must not count, or remove it.',
                reason=f"{field!r} in a turn",
            )
    for field in filter(message.__contains__, _FLAGS):
        if message[field] not in (0, 1):
            raise BadConversation(
                f"has the {field} {message[field]!r} in {which}, but a turn counts in full or not "
                "at all",
                fix="Write 1 or 0, or skip such rows with --on-bad-row skip.",
                reason=f"a {field} that is not 0 or 1",
            )
    return all(message.get(field, yes) == yes for field, yes in _FLAGS.items())


def _misplaced(field: str, where: str) -> BadConversation:
    return BadConversation(
        f"has {field!r} {where}, which is not read: the loss counts whole turns",
        fix='Write "weight": 0 in turns that the loss must not count, or remove it.',
        reason=f"{field!r} {where}",
    )


def _message(turn: Any, which: str) -> JsonObject:
    if not isinstance(turn, dict):
        raise BadConversation(
            f"has a {which} that is not an object",
            fix='Write turns such as {"role": "user", "content": "..."}.',
            reason="a turn is not an object",
        )
    role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    stated = turn.get(role_key)
    role = _ROLES.get(stated) if isinstance(stated, str) else None
    if role is None:
        raise BadConversation(
            f"has the role {stated!r} in {which}"
            if stated is not None
            else f"has no role in {which}",
            fix=f"Write {_KNOWN}, or skip such rows with --on-bad-row skip.",
            reason="unknown role",
        )
    rest: JsonObject = _without_nulls(
        {key: value for key, value in turn.items() if key not in (role_key, text_key)}
    )
    message: JsonObject = {"role": role, "content": _content(turn.get(text_key), rest, which)}
    if isinstance(calls := rest.get("tool_calls"), list):
        rest["tool_calls"] = [*map(_tool_call, calls)]
    return message | rest


def _without_nulls(value: Any, kept: tuple[str, ...] = ()) -> Any:
    """Return a value without the keys that are null, at any depth, except the `kept` ones.

    Table formats such as Parquet give all rows the same keys, and pad with nulls.
    """
    if isinstance(value, dict):
        return {
            key: _without_nulls(inner, kept)
            for key, inner in value.items()
            if inner is not None or key in kept
        }
    return [_without_nulls(inner, kept) for inner in value] if isinstance(value, list) else value


def _content(value: Any, rest: JsonObject, which: str) -> str:
    """Return the text of a turn, which may be stated in parts."""
    if isinstance(value, str):
        return value
    if value is None and rest.get("tool_calls"):
        return ""
    if isinstance(value, list):
        stated = (one for one in value if isinstance(one, dict))
        for field in (key for one in stated for key in MASK_FIELDS if one.get(key) is not None):
            raise _misplaced(field, "in a content part")
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if texts and len(texts) == len(parts):
            return "".join(texts)
    raise BadConversation(
        f"has content that is not text in {which}", reason="content that is not text"
    )


def _tool_call(call: Any) -> Any:
    """Return a call with parsed arguments, as templates expect. OpenAI states them as a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments", {})  # a call without any may be null in a table
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _tools(value: Any) -> list[Any] | None:
    """Return the tools of a row, which some datasets store as a JSON string."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadConversation(f"has {TOOLS!r} that are not JSON", reason="bad tools") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise BadConversation(f"has {TOOLS!r} that are not a list", reason="bad tools")
    if not any(isinstance(one, str) for one in value):
        return value
    return _tools(
        f"[{','.join(one if isinstance(one, str) else json.dumps(one) for one in value)}]"
    )
