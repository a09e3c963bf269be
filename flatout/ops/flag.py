"""Writes that a flag on the device can prevent, so that the host need not wait to know it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def assign_unless(skip: Tensor | None, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target; every bit of the targets stays if `skip` is 1.

    The values may contain anything then, NaN included.

    Shapes:  skip is 0-D, None stands for 0; each pair has one shape and dtype.
    Cost:    with a flag one kernel per pair, which reads both and writes one.
    """
    if skip is None:
        torch._foreach_copy_(list(targets), list(values))
        return
    stays = skip > 0
    for target, value in zip(targets, values, strict=True):
        torch.where(stays, target, value, out=target)
