"""Run Python's garbage collector at fixed steps, instead of after a number of allocations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import Off, On, Speedup, Tolerance

STEPS_BETWEEN = 100
"""Steps between collections, for which a reference cycle can keep its tensors' memory. Frozen
objects are not scanned, so a collection is short.
"""


@contextmanager
def at_fixed_steps() -> Iterator[Callable[[int], None]]:
    """Freeze existing objects, disable automatic collection, and yield a function that collects.

    The function collects at every hundredth step. The collector is restored on exit, except that
    objects frozen here stay frozen if others were frozen before: Python can only unfreeze all of
    them.
    """
    was_on, frozen_before = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        if not frozen_before:
            gc.unfreeze()
        if was_on:
            gc.enable()


def _collect(step: int) -> None:
    if step % STEPS_BETWEEN == 0:
        gc.collect()


def apply(parts: Parts) -> None:
    """Collect at fixed steps."""
    parts.gc = at_fixed_steps


SPEEDUP = Speedup(
    name="collector",
    apply=apply,
    saves="time: no step waits while Python's garbage collector scans every object, and all "
    "ranks collect at the same steps",
    tolerance=Tolerance.exact(),
    rank=820,
    auto={
        "cpu": Off(
            "in 380 steps, Python collected 7 times and never scanned all objects", measured=True
        ),
        "cuda": On("it costs nothing, and pauses of half a second have been reported"),
    },
)
