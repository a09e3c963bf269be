"""Plain values, as people write them by hand, of the recipe slots that need no torch import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

PLAIN_ROWS, PLAIN_TOKENS = 12, 131_072
"""The usual hand-written micro-batch: nanoGPT's 12 rows, at most the tokens of 4 x 32,768."""


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

    def divisors(self, at_most: int) -> Iterator[int]:
        """Yield the divisors of `rows_per_rank` up to `at_most`, largest first."""
        yield from (
            rows
            for rows in range(min(self.rows_per_rank, at_most), 0, -1)
            if self.rows_per_rank % rows == 0
        )


def rows_people_write(plan: MicroBatchPlan) -> int:
    """Return the largest row count, up to 12 and 131,072 tokens, that divides the step and fits."""
    at_most = max(min(PLAIN_ROWS, PLAIN_TOKENS // plan.seq_len), 1)
    return next(rows for rows in plan.divisors(at_most) if rows == 1 or plan.fits(rows))


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
