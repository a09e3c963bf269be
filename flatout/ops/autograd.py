"""The type of the context that autograd passes to the forward and backward of a function."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """What a function may use of its context; a subclass adds the attributes that it sets."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Return what `save_for_backward` was given.

        Shapes: any.
        """

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward.

        Shapes: any.
        """

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """State that these outputs have no gradient.

        Shapes: any.
        """
