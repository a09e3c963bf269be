"""Error messages for config mistakes: the key that was likely meant, its values and its help."""

from __future__ import annotations

from typing import TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flatout.config.units import in_cases, is_off
from flatout.errors import ConfigError
from flatout.registry import misspelt, nearest
from flatout.words import Word, known_words, value_for, word_for

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


def explain(error: ValidationError, section: type[BaseModel], prefix: str = "") -> ConfigError:
    """Return a ConfigError for the first wrong key that pydantic reports."""
    problems = error.errors()
    first = problems[0]
    key = _key_of(first, prefix)
    if first["type"] == "extra_forbidden":
        return unknown_key(*_whole(key, first["input"]), all_keys(section, prefix))
    field = field_at(section, key.removeprefix(prefix))
    if first["type"] == "model_type" or (field is not None and _is_section(field.annotation)):
        inside = [name for name in all_keys(section, prefix) if name.startswith(f"{key}.")]
        return ConfigError(
            f"{key}={_shown(first['input'])} is not valid: {key} is a section.",
            fix=f"Set one of its keys: {', '.join(inside)}.",
        )
    expected = dict.fromkeys(
        _expectation(problem) for problem in problems if _key_of(problem, prefix) == key
    )
    described = " ".join((field.description or "").split()) if field else ""
    help_text = f" {key}: {described}" if described else ""
    default = _default(field)
    meant = value_for(key, first["input"])
    change = (
        f"Did you mean {key}={meant}?"
        if meant is not None
        else f"Change it, or leave it at its default, {default}."
        if default is not None
        else "Change it, or leave it out."
    )
    return ConfigError(
        f"{key}={_shown(first['input'])} is not valid: it must be {' or '.join(expected)}.",
        fix=f"{change}{help_text}",
    )


def _shown(value: object) -> str:
    """Return a wrong value as Python writes it, cut after the part that identifies it."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _whole(key: str, value: object) -> tuple[str, object]:
    """Return the whole of another tool's dotted key and its value: wandb.enabled, of wandb."""
    while isinstance(value, dict) and len(value) == 1 and word_for(key):
        ((inner, value),) = value.items()
        key = f"{key}.{inner}"
    return key, value


def unknown_key(key: str, value: object, known: list[str]) -> ConfigError:
    """Return the error for an unknown config key, with the key that was most likely meant.

    Another tool's key is answered with its counterpart for the value, never with a similar name.
    """
    section, _, last = key.rpartition(".")
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section
    }
    tops = {top: top for top in (name.partition(".")[0] for name in known)} if not section else {}
    dotted = key.lower().replace("_", ".", 1)  # train_steps for train.steps
    word = None if dotted in known else word_for(key)
    if word is not None:
        return ConfigError(f"There is no config key {key!r}.", fix=_advice(word, value))
    guess = dotted if dotted in known else same_key(last, known)
    known_as = (siblings, tops, _by_last(known))
    near = [names[close] for names in known_as if (close := misspelt(last, names))]
    theirs = None if guess or near else misspelt(last, known_words())
    if theirs:
        advice = _advice(known_words()[theirs], value)
        return ConfigError(
            f"There is no config key {key!r}; other tools have {theirs!r}.", fix=advice
        )
    near += [names[close] for names in known_as if (close := nearest(last, names))]
    guess = guess or next(iter(near), None)
    listing = ", ".join(siblings.values() if section and siblings else known)
    return ConfigError(
        f"There is no config key {key!r}.",
        fix=f"Did you mean {guess!r}?" if guess else f"Known keys: {listing}.",
    )


def _advice(word: Word, value: object) -> str:
    """Return what to write for another tool's word; false, no and the like turn a switch off."""
    is_switch = any("disabled" in str(case).split() for case in word.cases) and word.key
    found = in_cases(value, word) if is_switch and isinstance(value, bool | str) else None
    if not (isinstance(found, dict) and is_off(value)):
        return word.advice
    if not found:
        return f"Leave it out: it is off unless {word.key} asks for it."
    written = " ".join(f"{key.lstrip('~')}={_written(key, one)}" for key, one in found.items())
    return f"Did you mean {next(iter(found)).lstrip('~')!r}? Write {written}."


def _written(key: str, value: object) -> str:
    """Return a value as an override has it."""
    if key == "speedups":
        return f"auto,{value}"
    return "none" if value == [] else str(value).lower() if isinstance(value, bool) else f"{value}"


def same_key(name: str, known: list[str]) -> str | None:
    """Return the key that has `name` as its last part, or None."""
    return _by_last(known).get(name.lower().replace("-", "_"))


def _by_last(known: list[str]) -> dict[str, str]:
    return {name.rpartition(".")[2]: name for name in reversed(known)}


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of a section and its subsections."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if _is_section(kind):
            keys.extend(all_keys(kind, f"{prefix}{name}."))
        else:
            keys.append(f"{prefix}{name}")
    return keys


def field_at(section: type[BaseModel], key: str) -> FieldInfo | None:
    """Return the field at a dotted key, or None."""
    top, _, rest = key.partition(".")
    field = section.model_fields.get(top)
    kind = field.annotation if field else None
    if rest and _is_section(kind):
        return field_at(kind, rest)
    return None if rest else field


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default(field: FieldInfo | None) -> object:
    """Return a field's default as a user writes it, or None."""
    if field is None or field.is_required() or isinstance(field.default, BaseModel):
        return None
    return list(field.default) if isinstance(field.default, tuple) else field.default


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
