"""Tensor functions. Each file holds one plain reference and any number of fast variants that must
match it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ops:
    """The exchangeable functions a model is given when it is built."""

    attention: Callable[..., Tensor]
    """Signature and definition: `flatout.ops.attention.reference`."""
    cross_entropy: Callable[..., tuple[Tensor, Tensor]]
    """Signature and definition: `flatout.ops.cross_entropy.reference`."""
    linear: Callable[..., Tensor]
    """Signature and definition: `flatout.ops.linear.reference`. The products inside the blocks."""
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Signature and definition: `flatout.ops.heads.reference`."""
    scan: Callable[..., Tensor]
    """Signature and definition: `flatout.ops.scan.reference`."""
    folding: Callable[[Any], Any]
    """Signature and definition: `flatout.ops.folding.reference`."""

    @classmethod
    def plain(cls, **others: Callable[..., Any]) -> Ops:
        """Return every function's reference, but for those given by name."""
        references = {
            field.name: import_module(f"flatout.ops.{field.name}").reference
            for field in fields(cls)
        }
        return cls(**references | others)


def variants(op: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return every function of `op` that can stand in for its `reference`: the public ones with the
    same signature, by name.
    """
    wanted = inspect.signature(op.reference)
    public = {
        name: value
        for name, value in vars(op).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    return {name: value for name, value in public.items() if inspect.signature(value) == wanted}


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor widened to fp32; fp32 and fp64 come back as they are.

    Shapes:  any.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
