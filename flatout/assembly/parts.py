"""Types that a recipe and a run share, and the plain values of slots that need no torch import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flatout.json_io import Stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

USED_MEMORY = 0.8
"""Share of the memory that a micro-batch may fill, by estimate."""
PLAIN_ROWS, PLAIN_TOKENS = 12, 131_072
"""The usual hand-written micro-batch: nanoGPT's 12 rows, at most the tokens of 4 x 32,768."""


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


@dataclass(frozen=True)
class MicroBatchPlan:
    """The inputs to the choice of a micro-batch."""

    seq_len: int
    rows_per_rank: int
    """Sequences per optimizer step on one rank, a multiple of the chosen rows."""
    device: str
    fits: Callable[[int], bool]
    """Whether a micro-batch of so many rows fits into memory, by estimate."""
    most_rows: Callable[[], int]
    """The most rows that fit. Raises HardwareError when a single one does not."""


def divisors(number: int, at_most: int) -> Iterator[int]:
    """Yield the divisors of a number up to `at_most`, largest first."""
    yield from (one for one in range(min(number, at_most), 0, -1) if number % one == 0)


def rows_people_write(plan: MicroBatchPlan) -> int:
    """Return the largest row count, up to 12 and 131,072 tokens, that divides the step and fits."""
    at_most = max(min(PLAIN_ROWS, PLAIN_TOKENS // plan.seq_len), 1)
    found = divisors(plan.rows_per_rank, at_most)
    return next(rows for rows in found if rows == 1 or plan.fits(rows))


class ImmediateReadback:
    """Reads the metrics from the device at every step, which makes the device wait for the host."""

    def __init__(self) -> None:
        self._read: list[tuple[int, dict[str, float]]] = []

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Read the `values` (name to 0-D tensor) of `step`, and keep them only when `due`.

        Shapes: each value is 0-D.
        """
        metrics = {name: float(value) for name, value in values.items()}
        if due:
            self._read.append((step, metrics))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics since the last call; `flush` has no effect, as nothing is pending."""
        read, self._read = self._read, []
        return read


def default_allocator() -> None:
    """Leave the allocator unchanged."""


def sync_every_micro_batch(_model: nn.Module, _is_last: bool) -> AbstractContextManager[None]:
    """Synchronise gradients between processes in every micro-batch."""
    return nullcontext()


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set every gradient to None; the next backward pass allocates new ones."""
    for parameter in parameters:
        parameter.grad = None


def zero_in_place(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradients to zero in place, and allocate missing ones.

    With DDP, gradients stay views of its buckets: it copies a gradient that backward allocated.
    With CUDA graphs, autograd takes the first gradient it finds as the parameter's own, and one
    that a graph wrote would be overwritten by the next micro-batch.
    """
    import torch

    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=parameter.device
                )
            gradients.append(parameter.grad)
    if gradients:
        torch._foreach_zero_(gradients)


@contextmanager
def automatic_gc() -> Iterator[Callable[[int], None]]:
    """Leave Python's garbage collector on; the callback for each step does nothing."""
    yield lambda _step: None
