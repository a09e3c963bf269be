"""What kinds of optimisers keep for a parameter. A checkpoint of one kind is no other's, and each
is told by the fields it stores.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor
from torch.optim import AdamW, Optimizer


@dataclass(frozen=True)
class Moments:
    """A kind of what is kept for one parameter. Tensors too small for eight bits are of the kind
    FP32 under torchao.
    """

    what: str
    """In words."""
    field: str
    """A field that no other kind has."""
    speedup: str | None = None
    """Which speedup keeps it so; None where plain optimisers do."""
    like_the_parameter: tuple[str, ...] | None = None
    """The fields that are fp32 tensors of the parameter's shape; None where what is kept is laid
    out otherwise.
    """
    numbers: tuple[str, ...] = ()
    """The fields that are tensors of one number, beside those."""


FP32 = Moments(
    "AdamW's moments in fp32",
    "exp_avg_sq",
    like_the_parameter=("exp_avg", "exp_avg_sq"),
    numbers=("step",),
)
TORCHAO = Moments(
    "AdamW's moments in eight bits, as adamw-8bit has them", "exp_avg_scale", "adamw-8bit"
)
BITSANDBYTES = Moments(
    "AdamW's moments as adamw-8bit-bitsandbytes has them", "state1", "adamw-8bit-bitsandbytes"
)
MOMENTUM = Moments("Muon's momentum", "momentum_buffer", like_the_parameter=("momentum_buffer",))
KINDS = (TORCHAO, BITSANDBYTES, FP32, MOMENTUM)
"""In the order in which they are looked for: TORCHAO has FP32's fields, and more."""


def kept_by(optimizer: Optimizer, parameter: Tensor) -> Moments | None:
    """Return what an optimiser keeps for a parameter from its first step on: its own
    `moments_of(parameter)` says so. None is not known.

    Shapes: parameter of any shape.
    """
    if hasattr(optimizer, "moments_of"):
        found: Moments = optimizer.moments_of(parameter)
        return found
    return FP32 if isinstance(optimizer, AdamW) else None


def stored_as(fields: Collection[str]) -> Moments:
    """Return which kind the fields of a parameter are of."""
    return next(
        (kind for kind in KINDS if kind.field in fields), Moments(", ".join(sorted(fields)), "")
    )


def way_to_go_on(stored: Moments, kept: Moments) -> str:
    """Return which optimiser goes on from `stored`, where this run would keep `kept`, as words
    after "Resume".
    """
    if stored.speedup is not None:
        return f"with {stored.speedup} in speedups"
    if stored == FP32 and kept.speedup is not None:
        return f"without {kept.speedup} in speedups"
    return "with the optimizer that wrote it"
