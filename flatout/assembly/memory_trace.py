"""Count the bytes of tensors while a part of a model runs; the tensors may have no storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the total bytes of tensors created inside the context, and the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.largest = 0
        self.operations = 0
        """Those that computed something: not views."""
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(part) for part in parts_of(tree_leaves((args, kwargs)))}
        made = [part for part in parts_of(tree_leaves(result)) if storage_id(part) not in given]
        self.operations += bool(made) or func._schema.is_mutable
        for part in made:
            if storage_id(part) not in self._seen:
                self._add(part.untyped_storage())
        return result

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def on_free(_: object) -> None:
            self._seen.pop(key, None)
            self.now -= size

        self._seen[key] = weakref.ref(storage, on_free)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)


@dataclass(frozen=True)
class Part:
    """Bytes of one part of a model in a micro-batch, apart from everything outside it."""

    kept: int
    """What exists between its forward and its backward pass, with its input if that is kept."""
    forward: int
    """Peak of its forward pass, with its input and its output."""
    backward: int
    """Peak of its backward pass, with what was kept and the gradient of its output."""
    gradients: int
    """Gradients of weights that did not exist before its backward pass."""
    operations: int
    """Operations of both passes, without views."""
    largest: int
    """The largest tensor of both passes."""


def trace(
    call: Callable[[Tensor | None], Tensor],
    entered: tuple[torch.Size, torch.dtype] | None,
    precision: Callable[[], AbstractContextManager[Any]],
) -> Part:
    """Run a part forward and backward, and return its bytes.

    The part is called with a tensor of the shape and dtype `entered`, or None. What it returns is
    the input of the next part, which counts it.
    """
    leaf = torch.zeros((), requires_grad=True)
    with Live() as live:
        given = None if entered is None else _Enter.apply(leaf, *entered)  # type: ignore[no-untyped-call]
        with precision():
            left = call(given)
        del given
        end = _Leave.apply(left)  # type: ignore[no-untyped-call]
        del left
        kept, forward = live.now, live.peak
        live.restart_peak()
        if end.requires_grad:  # not after an embedding that is frozen
            end.backward()
        del end
    return Part(kept, forward, live.peak, live.now, live.operations, live.largest)


class _Enter(torch.autograd.Function):
    """Makes the input of a part; nothing else holds it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.zeros(()), None, None


class _Leave(torch.autograd.Function):
    """Takes the output of a part; in backward, makes its gradient, which nothing else holds."""

    @staticmethod
    def forward(ctx: Any, left: Tensor) -> Tensor:
        ctx.like = left.shape, left.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; each storage counts once."""
    sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def parts_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`; for a wrapper subclass, the tensors inside it."""
    for value in values:
        if is_traceable_wrapper_subclass(value):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)
