"""The state that each kind of optimizer keeps for a parameter, identified by its fields."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor
from torch.optim import AdamW, Optimizer


@dataclass(frozen=True)
class Moments:
    """The state that one kind of optimizer keeps for a parameter.

    A checkpoint of one kind cannot be loaded by another. With torchao, tensors that are too small
    for eight bits are of the kind FP32.
    """

    what: str
    """A description."""
    field: str
    """A field that no other kind has."""
    speedup: str | None = None
    """The speedup that uses this kind. None for plain optimizers."""


FP32 = Moments("AdamW's moments in fp32", "exp_avg_sq")
TORCHAO = Moments(
    "AdamW's moments in eight bits, as adamw-8bit stores them", "exp_avg_scale", "adamw-8bit"
)
MOMENTUM = Moments("Muon's momentum", "momentum_buffer")
KINDS = (TORCHAO, FP32, MOMENTUM)
"""In the order of the search: TORCHAO has the fields of FP32, and more."""


def kept_by(optimizer: Optimizer, parameter: Tensor) -> Moments | None:
    """Return the state that an optimizer keeps for a parameter. None if unknown.

    Shapes: parameter of any shape.
    """
    if hasattr(optimizer, "moments_of"):
        return optimizer.moments_of(parameter)  # type: ignore[no-any-return]
    return FP32 if isinstance(optimizer, AdamW) else None


def stored_as(fields: Collection[str]) -> Moments:
    """Return the kind of state that has these fields."""
    return next(
        (kind for kind in KINDS if kind.field in fields), Moments(", ".join(sorted(fields)), "")
    )


def how_to_resume(stored: Moments, kept: Moments) -> str:
    """Return the words after "Resume" that name an optimizer for `stored`. This run uses `kept`."""
    if stored.speedup is not None:
        return f"with {stored.speedup} in speedups"
    if stored == FP32 and kept.speedup is not None:
        return f"without {kept.speedup} in speedups"
    return "with the optimizer that wrote it"
