"""What a unit is, and the registry of units by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flatout.json_io import JsonObject

Unit = Callable[[Any, str, Mapping[str, Any]], "JsonObject | str"]
"""Receives the value, the key of flatout (or the unit's argument), and the values found so far."""
UNITS: dict[str, Unit] = {}
"""All units by name."""
EARLY: set[str] = set()
"""Units whose values others need."""
LATE: set[str] = set()
"""Units that need the values of other keys."""
THEIRS = "their "
"""Before a key of the other tool's file, among the values found so far: its own value."""
SOURCE = "SOURCE"
"""The argument of `flatout prepare`."""
LITGPT = r"^checkpoints/(?=[^/]+/[^/]+$)"
"""Start of a path where litgpt stores ORG/NAME of the hub."""
HUB = "hf:"
"""Start of a model of the Hugging Face hub in train.init_from."""
OFF = {"none", "no", "off", "false", "disabled", "eager", "for-loop", "foreach", "0"}
"""Values, as text, that turn a feature off."""


class Unneeded(str):
    """The reason why a value needs no counterpart."""


class Refused(str):
    """The reason why nothing of a config can be converted, because of one value."""


def unit(function: Unit) -> Unit:
    """Register a function under its name."""
    UNITS[function.__name__] = function
    return function


def early(function: Unit) -> Unit:
    """Register a function whose values others need."""
    EARLY.add(function.__name__)
    return unit(function)


def late(function: Unit) -> Unit:
    """Register a function that needs the values of other keys."""
    LATE.add(function.__name__)
    return unit(function)


def times(value: Any, factor: Any) -> Any:
    """Return the product of two numbers; text must not be repeated.

    Raises: TypeError when one of them is no number.
    """
    return (value + 0) * (factor + 0)  # text plus 0 is an error; text times a number is not


def is_off(value: object) -> bool:
    """Return whether a value of another tool turns its feature off."""
    return not value or str(value).lower() in OFF
