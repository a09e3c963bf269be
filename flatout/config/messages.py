"""Error messages for config mistakes: the key that was likely meant, its values and its help."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flatout.config.registry import misspelt, nearest
from flatout.config.words import Word, is_off, known_words, removed, value_for, word_for
from flatout.errors import ConfigError

LONGEST_VALUE = 200
"""Characters of a wrong value that an error repeats."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "finite": "a finite number",
}


class ForeignKeys(ConfigError):
    """Several keys are another tool's. The fix has an answer for each."""


def explain(error: ValidationError, section: type[BaseModel], prefix: str = "") -> ConfigError:
    """Return a ConfigError for the first wrong key that pydantic reports."""
    problems, fields = error.errors(), fields_of(section, prefix)
    key, kind, value = _key_of(problems[0], prefix), problems[0]["type"], problems[0]["input"]
    unknown = [one for one in problems if one["type"] == "extra_forbidden"]
    tops = {name.partition(".")[0] for name in fields}
    inside = (_inside(_key_of(one, prefix), one["input"], tops) for one in unknown)
    names = {name: one for found in inside for name, one in found.items()}
    if kind == "extra_forbidden" and len(names) > 1:
        known = all_keys(section, prefix)
        answers = (f"{key}: {unknown_key(key, value, known).fix}" for key, value in names.items())
        what, fix = f"There are no config keys {', '.join(names)}.", " ".join(answers)
        if sum(word_for(name) is not None for name in names) > 1:
            return ForeignKeys(f"{what} Other tools have them.", fix=fix)
        return ConfigError(what, fix=fix)
    if kind == "extra_forbidden":
        while isinstance(value, dict) and len(value) == 1 and word_for(key):
            ((inner, value),) = value.items()  # the whole of another tool's key: wandb.enabled
            key = f"{key}.{inner}"
        return unknown_key(key, value, all_keys(section, prefix))
    text = repr(value)
    shown = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
    field = fields.get(key)
    own = [name for name in all_keys(section, prefix) if name.startswith(f"{key}.")]
    if kind == "model_type" or own:
        return ConfigError(
            f"{key}={shown} is not valid: {key} is a section.",
            fix=f"Set one of its keys: {', '.join(own)}.",
        )
    expected = dict.fromkeys(
        _expectation(problem) for problem in problems if _key_of(problem, prefix) == key
    )
    described = " ".join((field.description or "").split()) if field else ""
    default = field.default if field and not field.is_required() else None
    if isinstance(default, tuple):
        default = [*default]
    meant = value_for(key, value)
    change = (
        f"Did you mean {key}={meant}?"
        if meant is not None
        else "Put it in quotes."
        if "text" in expected
        else f"Change it, or leave it at its default, {default}."
        if default is not None
        else "Change it, or remove it."
    )
    return ConfigError(
        f"{key}={shown} is not valid: it must be {' or '.join(expected)}.",
        fix=f"{change} {key}: {described}" if described else change,
    )


def _inside(key: str, value: object, known: Collection[str] = ()) -> dict[str, object]:
    """Return an unknown key, or all dotted keys of a section that is no misspelt `known` one."""
    if not isinstance(value, dict) or misspelt(key, known):
        return {key: value}
    found: dict[str, object] = {}
    for name, one in value.items():
        found |= _inside(f"{key}.{name}", one)
    return found


def unknown_key(key: str, value: object, known: list[str]) -> ConfigError:
    """Return the error for an unknown config key, with the key that was most likely meant.

    Another tool's key is answered with its counterpart for the value, never with a similar name.
    """
    if key in known:  # a recipe has it in one piece
        written = f"{key.replace('.', ': {')}: {json.dumps(value, default=str)}"
        return ConfigError(
            f"There is no config key {key!r}.",
            fix=f"Put it in its section: `{written}{'}' * key.count('.')}`.",
        )
    if instead := removed(key):
        return ConfigError(f"There is no config key {key!r} any more.", fix=instead)
    section, _, last = key.rpartition(".")
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section
    }
    tops = {} if section else {top: top for top in (name.partition(".")[0] for name in known)}
    dotted = key.lower().replace("_", ".", 1)  # train_steps for train.steps
    word = None if dotted in known else word_for(key)
    if word is not None:
        return ConfigError(f"There is no config key {key!r}.", fix=_advice(word, value))
    beside = next((siblings[name] for name in siblings if last in name.split("_")), None)
    ends = by_last(known)
    guess = dotted if dotted in known else beside or ends.get(last.lower().replace("-", "_"))
    known_as = (siblings, tops, ends)
    near = [names[close] for names in known_as if (close := misspelt(last, names))]
    theirs = None if guess or near else misspelt(last, known_words())
    if theirs:
        return ConfigError(
            f"There is no config key {key!r}. Other tools have {theirs!r}.",
            fix=_advice(known_words()[theirs], value),
        )
    near += [names[close] for names in known_as if (close := nearest(last, names))]
    guess = guess or next(iter(near), None)
    listing = ", ".join(siblings.values() if section and siblings else known)
    return ConfigError(
        f"There is no config key {key!r}.",
        fix=f"Did you mean {guess!r}?" if guess else f"Known keys: {listing}.",
    )


def _advice(word: Word, value: object) -> str:
    """Return what to write for another tool's word. false, no and the like turn a switch off."""
    if word.if_false is None or not (isinstance(value, bool | str) and is_off(value)):
        return word.advice
    if not word.if_false:
        return f"Leave it out: it is off unless {word.key} asks for it."
    return f"Did you mean {word.if_false.partition('=')[0]!r}? Write {word.if_false}."


def by_last(known: list[str]) -> dict[str, str]:
    """Return the keys by their last parts. Of several, the first counts."""
    return {name.rpartition(".")[2]: name for name in reversed(known)}


def fields_of(section: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the fields of a section and its subsections by dotted key, with the subsections."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        found[f"{prefix}{name}"] = field
        if _is_section(field.annotation):
            found |= fields_of(field.annotation, f"{prefix}{name}.")
    return found


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of a section and its subsections."""
    fields = fields_of(section, prefix).items()
    return [key for key, field in fields if not _is_section(field.annotation)]


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _key_of(problem: ErrorDetails, prefix: str) -> str:
    """Return the dotted key of a pydantic error, without list positions and union branches."""
    tags = ("literal[", "tuple[", "constrained-", "function-")
    parts = (
        part
        for part in problem["loc"]
        if isinstance(part, str) and part not in {"int", "float", "str", "tuple", "bool"}
    )
    return prefix + ".".join(part for part in parts if not part.startswith(tags))


def _expectation(problem: ErrorDetails) -> str:
    """Return what a pydantic error expected: `a whole number`, `at least 1`, `'auto'`."""
    kind, context = problem["type"], problem.get("ctx", {})
    bounds = {
        "greater_than": f"more than {context.get('gt', 0):g}",
        "greater_than_equal": f"at least {context.get('ge', 0):g}",
        "less_than": f"less than {context.get('lt', 0):g}",
        "less_than_equal": f"at most {context.get('le', 0):g}",
        "literal_error": str(context.get("expected")),
        "missing": "a longer list" if isinstance(problem["loc"][-1], int) else "given",
        "too_long": "a shorter list",
    }
    return (
        bounds.get(kind)
        or _KINDS.get(kind.partition("_")[0])
        or problem["msg"].lower().removeprefix("input should be ")
    )
