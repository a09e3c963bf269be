"""Overrides: `section.key=value` on a command line, over a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from flatout.config.messages import field_at
from flatout.documents import parse_yaml
from flatout.errors import ConfigError


def parse_overrides(overrides: Iterable[str], section: type[BaseModel]) -> dict[str, Any]:
    """Return the values of some overrides by dotted key; their keys may be unknown still.

    Raises: ConfigError when one is no override.
    """
    values: dict[str, Any] = {}
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
    """Read an override's value as YAML; what belongs to a text key stays text, whatever YAML would
    make of it.
    """
    field = field_at(section, key)
    if field is None or field.annotation not in (str, str | None):
        try:
            return parse_yaml(text, name=name) if text.strip() else None
        except ConfigError as error:
            if not isinstance(error.__cause__, yaml.YAMLError):
                raise  # it is YAML, and says itself what is wrong with it: a key given twice
            raise ConfigError(
                f"{name!r} is not YAML.",
                fix="Repair the value, and put the whole in quotes: 'section.key=value'.",
            ) from error
    if not text.strip() or text.strip() in {"null", "~"}:
        return text if field.annotation is str else None
    try:
        value = parse_yaml(text, name=name)
    except ConfigError:
        return text
    return value if isinstance(value, str) else text


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn {"optim.lr": 1} into {"optim": {"lr": 1}}."""
    document: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(
                    f"{key} contradicts {section}={place}, given before it.",
                    fix="Keep one of the two.",
                )
        place[last] = value
    return document
