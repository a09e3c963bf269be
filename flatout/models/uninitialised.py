"""Building a model whose weights come from a checkpoint, without drawing random ones first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWN = {nn.init.normal_, nn.init.kaiming_uniform_}
"""What flatout's own models draw their weights with."""


def uninitialised(kind: str) -> AbstractContextManager[object]:
    """Return a context in which models of this kind keep arbitrary values for their random weights.

    Drawing takes about a second per 100 million parameters. The caller replaces every parameter.
    Custom models are initialised: a buffer that no checkpoint stores may use the same generator.
    """
    return nullcontext() if ":" in kind else _Undrawn()


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _DRAWN:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
