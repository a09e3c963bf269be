"""Tensor functions. Each file holds one plain reference and any number of fast variants that must match it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Ops:
    """The exchangeable functions a model is given when it is built."""

    attention: Callable[..., Tensor]
    """Signature and definition: `flatout.ops.attention.reference`."""
    cross_entropy: Callable[..., tuple[Tensor, Tensor]]
    """Signature and definition: `flatout.ops.cross_entropy.reference`."""
