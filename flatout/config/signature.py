"""Declares the parameters of commands, and checks the values that callers pass.

The command line is built from the same declarations, by `parser.py`.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from flatout.errors import ConfigError

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
KINDS: dict[Any, tuple[Any, str]] = {
    NoneType: (NoneType, "None"),
    str: (str, "text"),
    Path: (PathLike, "a path (not an empty one)"),
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
}
"""What Python may pass for the type of a parameter, and its name."""


@dataclass(frozen=True)
class Argument:
    """Marks a parameter as a positional argument of the command line."""

    help: str


class Option:
    """Marks a parameter as an option of the command line."""

    def __init__(self, help: str, *names: str, min: float | None = None) -> None:
        self.help = help
        self.names = names
        """Its names, if they differ from the parameter's. A short one (`-v`) comes last."""
        self.min = min
        """The smallest number it accepts."""


def checked(call: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let a command's function check its arguments by its annotations, for every caller.

    Only what is annotated with `Argument` or `Option` is checked. The command line goes through
    this too. Its parser takes types, choices and limits from the same annotations.

    Raises: ConfigError that names the parameter, its value and what is allowed.
    """

    @functools.wraps(call)
    def checked_call(*values: Parameters.args, **named: Parameters.kwargs) -> Returned:
        signature = inspect.signature(call, eval_str=True)
        for name, value in signature.bind(*values, **named).arguments.items():
            annotation = signature.parameters[name].annotation
            if not hasattr(annotation, "__metadata__"):
                continue
            kinds, mark = kinds_in(annotation.__origin__), annotation.__metadata__[0]
            least = getattr(mark, "min", None)
            is_empty_path = value == "" and Path in kinds
            if is_empty_path or not any(_fits(value, kind, least) for kind in kinds):
                first = ", ".join(_described(kind, least) for kind in kinds)
                raise ConfigError(
                    f"{name}={reprlib.repr(value)} must be {' or '.join(first.rsplit(', ', 1))}.",
                    fix=f"Correct {name}: {mark.help}",
                )
        return call(*values, **named)

    return checked_call


def one_of(options: Mapping[str, object]) -> None:
    """Check that at most one of these is given, by their names: another would have no effect.

    Raises: ConfigError.
    """
    given = [name for name, value in options.items() if value][:2]
    if len(given) == 2:
        what = f"{' and '.join(given)} cannot be combined."
        raise ConfigError(what, fix="Remove one of the two.")


def texts(given: Iterable[str | Path] | str | Path | None) -> tuple[str, ...]:
    """Return what a caller passes as one text or path, or several, or None, as texts."""
    return tuple(map(str, [given] if isinstance(given, str | Path) else given or ()))


def kinds_in(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one that it is."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _fits(value: Any, kind: Any, least: float | None = None) -> bool:
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return value in inner
    if inner:
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if not isinstance(value, KINDS.get(kind, (kind,))[0]):
        return False
    if isinstance(value, bool):  # for Python, True is a number
        return kind is bool
    if kind not in (int, float):
        return True
    return abs(value) <= sys.float_info.max and (least is None or value >= least)


def _described(kind: Any, least: float | None = None) -> str:
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, inner))
    if inner:
        return f"a list of {_described(inner[0])}"
    name = KINDS.get(kind, ("", f"a {kind.__name__}"))[1]
    return f"{name} from {least:g}" if least is not None and kind in (int, float) else name
