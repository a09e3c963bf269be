"""Functions that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch._compile

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which breaks the graph of a compiled caller and runs as written.

    As `torch.compiler.disable`, but the compiler, which takes a second to import, is imported at
    the first call.
    """
    return torch._compile._disable_dynamo(function)


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, whose result a compiled caller takes for a constant.

    As `torch.compiler.assume_constant_result`, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
