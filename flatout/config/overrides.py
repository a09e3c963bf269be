"""Overrides: `section.key=value` on the command line, applied over a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import BaseModel

from flatout.config.messages import field_at
from flatout.documents import parse_yaml
from flatout.errors import ConfigError
from flatout.json_io import JsonObject


def parse_overrides(overrides: Iterable[str], section: type[BaseModel]) -> JsonObject:
    """Return the values of overrides by dotted key, without checking the keys.

    Raises: ConfigError when an item is not an override.
    """
    values: JsonObject = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(
                f"{override!r} is not an override.",
                fix="Write section.key=value, for example optim.lr=3e-4.",
            )
        values[key.strip()] = _value(section, key.strip(), text, override)
    return values


def _value(section: type[BaseModel], key: str, text: str, name: str) -> Any:
    """Return an override's value: parsed as YAML, or as text for a text key."""
    field = field_at(section, key)
    if field is None or field.annotation not in (str, str | None):
        try:
            return parse_yaml(text, name=name) if text.strip() else None
        except ConfigError as error:
            if not isinstance(error.__cause__, yaml.YAMLError):
                raise  # valid YAML with its own message, such as a repeated key
            raise ConfigError(
                f"{name!r} is not YAML.",
                fix="Correct the value, and quote the whole override: 'section.key=value'.",
            ) from error
    if not text.strip() or text.strip() in {"null", "~"}:
        return text if field.annotation is str else None
    try:
        value = parse_yaml(text, name=name)
    except ConfigError:
        return text
    return value if isinstance(value, str) else text


def nested(values: JsonObject) -> JsonObject:
    """Return {"optim.lr": 1} as {"optim": {"lr": 1}}."""
    document: JsonObject = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{key} contradicts the earlier {section}={inner}.",
                    fix="Keep one of the two.",
                )
        inner[last] = value
    return document
