"""float64 beside a device that has none: MPS, the GPU of a Mac, computes in fp32 at most."""

from __future__ import annotations

import torch
from torch import Tensor


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU for a device without float64."""
    return torch.device("cpu") if device.type == "mps" else device


def in_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, on its device if that has float64, or else on the CPU.

    Shapes:  any.
    """
    return tensor.to(float64_device(tensor.device)).double()
