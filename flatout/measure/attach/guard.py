"""Keeps what flatout does in a script's process from failing the script. No torch."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

LOG = logging.getLogger("flatout.watch")
FAILED: set[str] = set()
"""Places at which hooks have failed. Each is logged once."""


def guarded(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ours that cannot fail the code which calls it: its errors are logged."""

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}:{last.lineno}"
            if place not in FAILED:
                FAILED.add(place)
                LOG.warning("flatout fails at %s, and the script continues: %r", place, error)
            return None

    return call


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Any:
    """Replace a function of a class or a module for the life of this process, and return ours."""
    plain = getattr(owner, name)
    ours = functools.wraps(plain)(wrap(plain))
    if isinstance(owner, ModuleType):  # where pickle finds it, and another process the plain one
        ours.__module__, ours.__qualname__ = owner.__name__, name
    setattr(owner, name, ours)
    return ours


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a module or class inside the block, unless it does not have it."""
    plain, is_own = getattr(owner, name, None), name in vars(owner)
    if plain is None:
        yield
        return
    ours = replace(owner, name, wrap)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:  # nobody else replaced it since
            if is_own:
                setattr(owner, name, plain)
            else:
                delattr(owner, name)
