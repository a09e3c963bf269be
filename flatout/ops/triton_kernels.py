"""Imports the modules of Triton kernels, and tells where such kernels run."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torch import Tensor

from flatout.errors import MissingPackage


def run_on(tensor: Tensor) -> bool:
    """Return whether Triton kernels run on the device of the tensor.

    Shapes:  any.
    """
    return tensor.is_cuda


def load(name: str) -> ModuleType:
    """Import `flatout.ops.NAME`, a module of kernels written in Triton.

    Call it inside a custom op, which compilers do not trace.
    Raises: MissingPackage when Triton is not installed.
    """
    try:
        return import_module(f"flatout.ops.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingPackage(
            f"flatout.ops.{name} needs the package triton, which is not installed.",
            fix="Install it: `pip install triton`, or remove the speedup that uses it.",
        ) from error
