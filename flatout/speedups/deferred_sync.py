"""Gradients are exchanged between processes once a step, with its last micro-batch, instead of with
each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flatout.assembly.recipe import On, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


@contextmanager
def with_the_last(model: Any, is_last: bool) -> Iterator[None]:
    """Let gradients add up in each process until the last micro-batch: DDP and fully_shard each
    have a switch for it.

    A run of several processes may resume on one, where the model is bare and there is nothing to
    exchange.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        yield
    else:
        with model.no_sync() if not is_last and hasattr(model, "no_sync") else nullcontext():
            yield


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    replicate, shard = config.parallel.replicate, config.parallel.shard
    if (1 if replicate == "auto" else replicate) * shard == 1:
        return "It is for several processes, and this is one."
    if config.batch.accumulate == 1:
        return "A step is one micro-batch: gradients are exchanged once as it is."
    if shard > 1 and "deferred-sync" not in config.speedups:
        return "Between micro-batches each GPU would hold whole gradients, which parallel.shard splits: name it where there is memory."
    return None


SPEEDUP = Speedup(
    name="deferred-sync",
    fills={"grad_sync": with_the_last},
    saves="time: with N micro-batches a step gradients travel between GPUs once, not N times",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=830,
    auto={"cpu": On(), "cuda": On("gradients travel once a step, not once a micro-batch")},
)
