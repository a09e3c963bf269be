"""Tensor functions: each file holds a plain reference and the fast variants that must match it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
import torch._compile
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Ops:
    """The functions that a model is built with. Speedups replace them."""

    attention: Callable[..., Tensor]
    """Defined by `flatout.ops.attention.reference`."""
    cross_entropy: Callable[..., tuple[Tensor, Tensor]]
    """Defined by `flatout.ops.cross_entropy.reference`."""
    linear: Callable[..., Tensor]
    """Defined by `flatout.ops.linear.reference`: the matmuls inside the blocks."""
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Defined by `flatout.ops.heads.reference`."""
    scan: Callable[..., Tensor]
    """Defined by `flatout.ops.scan.reference`."""

    @classmethod
    def plain(cls, **others: Callable[..., Any]) -> Ops:
        """Return the reference of every function, except those given by name."""
        references = {
            field.name: import_module(f"flatout.ops.{field.name}").reference
            for field in fields(cls)
        }
        return cls(**references | others)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor widened to fp32. Fp32 and fp64 tensors are returned unchanged.

    Shapes:  any.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def product_dtype(left: Tensor, right: Tensor) -> torch.dtype:
    """Return the dtype in which the matmul of two tensors is computed: autocast's, or their own.

    Shapes:  any.
    """
    device = left.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(left.dtype, right.dtype)


def runs_triton(tensor: Tensor) -> bool:
    """Return whether Triton kernels run on the device of the tensor.

    Shapes:  any.
    """
    return tensor.is_cuda


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which breaks the graph of a compiled caller and runs as written.

    As `torch.compiler.disable`, but the compiler, which takes a second to import, is imported at
    the first call.
    """
    return torch._compile._disable_dynamo(function)


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU for MPS, the GPU of a Mac, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def in_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, on its device if that has float64, or else on the CPU.

    Shapes:  any.
    """
    return tensor.to(float64_device(tensor.device)).double()
