"""Synchronise gradients between processes once per step, with its last micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from flatout.assembly.recipe import On, Speedup, Tolerance
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def sync_with_the_last(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Accumulate gradients in each process until the step's last micro-batch.

    DDP and fully_shard each have a switch for it. A run of several processes may resume on one,
    where the model is not wrapped and there is nothing to synchronise.
    """
    wrapped: Any = model
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(is_last)
        yield
    else:
        defers = not is_last and hasattr(wrapped, "no_sync")
        with wrapped.no_sync() if defers else nullcontext():
            yield


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    replicate, is_sharded = config.parallel.replicate, config.parallel.is_sharded
    if replicate in ("auto", 1) and not is_sharded:
        return "It only applies to several processes, but this run has one."
    if config.batch.accumulate == 1:
        return "A step has one micro-batch, so gradients are already synchronised once per step."
    if is_sharded and "deferred-sync" not in config.speedups:
        return (
            "Between micro-batches each GPU would hold unsharded gradients, which parallel.shard "
            "avoids: use it where there is enough memory."
        )
    return None


SPEEDUP = Speedup(
    name="deferred-sync",
    fills={"grad_sync": sync_with_the_last},
    saves="time: with N micro-batches per step, gradients are all-reduced once, not N times",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=830,
    auto={
        "cpu": On(),
        "cuda": On("gradients are all-reduced once per step, not once per micro-batch"),
    },
)
