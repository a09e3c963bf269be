"""The plain value of each recipe slot that needs no torch to name: what people write by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flatout.assembly.memory import Workload

PLAIN_ROWS, PLAIN_TOKENS = 12, 131_072
"""The micro-batch that people write: nanoGPT's 12 rows, capped at the tokens of 4 rows of 32,768.
"""
USED_MEMORY = 0.8
"""Share of the memory that the estimate of a micro-batch may fill."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """What the micro-batch is chosen from."""

    workload: Workload
    rows_per_rank: int
    """Sequences per optimiser step on one rank; the chosen rows divide it."""
    device: str
    memory_bytes: int
    """Total memory that one rank may use."""

    def divisors(self, at_most: int) -> Iterator[int]:
        """Yield the row counts up to `at_most` that divide a rank's share of the step, largest
        first.
        """
        yield from (
            rows
            for rows in range(min(self.rows_per_rank, at_most), 0, -1)
            if self.rows_per_rank % rows == 0
        )

    def fits(self, rows: int) -> bool:
        """Return whether a micro-batch of `rows` sequences fits into memory."""
        from flatout.assembly.memory import estimate

        return estimate(self.workload, rows).total <= USED_MEMORY * self.memory_bytes


def rows_people_write(plan: MicroBatchPlan) -> int:
    """Return the most rows, up to 12 and 131,072 tokens, that divide the step and fit."""
    at_most = max(min(PLAIN_ROWS, PLAIN_TOKENS // plan.workload.seq_len), 1)
    return next(rows for rows in plan.divisors(at_most) if rows == 1 or plan.fits(rows))


class ImmediateReadback:
    """Reads the metrics from the device in every step, which makes the device wait for the host."""

    def __init__(self) -> None:
        self._read: list[tuple[int, dict[str, float]]] = []

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Read `values` (name to 0-D tensor) of `step`, and keep them only when `due`.

        Shapes: each value is 0-D.
        """
        metrics = {name: float(value) for name, value in values.items()}
        if due:
            self._read.append((step, metrics))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return what was read since the last call; `flush` has no effect: nothing is pending."""
        read, self._read = self._read, []
        return read


def default_allocator() -> None:
    """Leave the process's allocator unchanged."""


def sync_every_micro_batch(_model: nn.Module, _is_last: bool) -> AbstractContextManager[None]:
    """Synchronise gradients between processes in every micro-batch."""
    return nullcontext()


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set every gradient to None; the next backward pass allocates new ones."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def automatic_gc() -> Iterator[Callable[[int], None]]:
    """Leave Python's garbage collector on; the yielded callback, called after each step, does
    nothing.
    """
    yield lambda _step: None
