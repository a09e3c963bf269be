"""Types that a recipe and a run share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flatout.json_io import Stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor

USED_MEMORY = 0.8
"""Share of the memory that a micro-batch may fill, by estimate."""


@dataclass(frozen=True)
class Decision:
    """Whether a speedup is on, and why."""

    name: str
    on: bool
    reason: str


@dataclass(frozen=True)
class Precision:
    """Arithmetic of matrix products. Weights, gradients and optimizer state stay in fp32."""

    name: Literal["fp32", "bf16", "fp16"]
    """The value of train.precision in the resolved config."""
    autocast: str | None = None
    """torch dtype of the products; None leaves them in fp32."""
    loss_scale: float | None = None
    """Initial loss scale; None where gradients cannot underflow."""

    def dtype(self) -> torch.dtype | None:
        """Return the torch dtype of the products, or None."""
        import torch

        found: torch.dtype | None = getattr(torch, self.autocast) if self.autocast else None
        return found

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context for calling a model on `cpu` or `cuda`."""
        import torch

        return torch.autocast(device_type, dtype=self.dtype()) if self.autocast else nullcontext()


FP32 = Precision("fp32")


class Gain(Stored):
    """What a speedup gained in the last ladder that measured it."""

    gain: float
    """How many times faster training is with it."""
    low: float | None
    """Lower end of its 94% interval; null: too few repeats to tell."""
    high: float | None
    """Upper end."""
    where: str
    """What it was added to or left out of."""
    recipe: str
    """Recipe of that ladder."""
    date: str
    """When the ladder started."""
    commit: str | None
    """Commit of flatout; null outside a checkout."""
    torch: str
    """Version of torch."""

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval lies below 1."""
        return self.high is not None and self.high < 1

    def describe(self) -> str:
        """Return one line for a person."""
        spread = (
            "too few repeats to be sure"
            if self.low is None or self.high is None
            else f"{self.low:.2f} to {self.high:.2f}"
        )
        at = f", commit {self.commit}" if self.commit else ""
        return f"x{self.gain:.2f} ({spread}), {self.where} of {self.recipe}, {self.date[:10]}{at}"


class Readback(Protocol):
    """Brings metrics from the device to the host."""

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Take the metrics of a step (name to 0-D tensor); only those that are `due` are kept.

        Shapes: each value is 0-D.
        """

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics that have reached the host; with `flush`, wait for all of them."""
