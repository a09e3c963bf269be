"""What would make a run fit, and what each change costs in speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flatout.assembly.memory import Workload, estimate, smaller_batch
from flatout.assembly.prediction import GIB, gains_here
from flatout.assembly.recipe import Speedup
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import adding, all_speedups
from flatout.errors import FlatoutError
from flatout.measure.plan.plan import Plan, resolve_for
from flatout.ops import cross_entropy

LEAST_SAVING = 0.02
"""Changes that save less of the memory are left out."""
NOT_MEASURED = "not measured"
TOUCH_MEMORY = {
    "activations",
    "gather_dtype",
    "low_precision",
    "moments",
    "optimizer",
    "precision",
    "residual",
}
"""Slots of speedups that may need less memory, besides the ops."""


@dataclass(frozen=True)
class Change:
    """One change to a run that needs less memory."""

    overrides: tuple[str, ...]
    """What to add to the command line."""
    saves_gib: float
    need_gib: float
    """What all tensors need with it."""
    fits: bool
    speed: str
    """Its cost or gain in speed, and where that comes from."""
    promise: str | None
    """The promise of its speedups about the losses, if it is weaker than rounding."""


def changes(plan: Plan) -> list[Change]:
    """Return the changes that save memory, the largest saving first; then a set that fits.

    A set is built when no single change is enough: sharding over all GPUs, the speedups that save
    most, one by one, then fewer rows.
    """
    if plan.available is None:
        return []
    leaner = sorted(_leaner_speedups(plan), key=lambda one: _need(plan, one[1]))
    found = [change for change in _single(plan, leaner) if change.saves_gib > 0]
    found.sort(key=lambda change: (not change.fits, change.need_gib))
    if not any(change.fits for change in found):
        found = [*_together(plan, [speedup for speedup, _ in leaner]), *found]
    return found


def _single(plan: Plan, leaner: Sequence[tuple[Speedup, Workload]]) -> Iterator[Change]:
    """Yield changes by fewer rows, one of the speedups, the model's settings, or sharding."""
    workload = plan.workload
    batch = _fewer_rows(plan, workload)
    if batch:
        yield _change(plan, workload, batch=batch)
    for speedup, leaner_workload in leaner:
        yield _change(plan, leaner_workload, [speedup])
    leanest = dict(workload.model_class.leanest(workload.model_config))
    if leanest:
        config = workload.model_config.model_copy(update=leanest)
        overrides = [f"model.{key}={value}" for key, value in leanest.items()]
        yield _change(plan, replace(workload, model_config=config), overrides=overrides)
    if _can_shard(plan):
        world = plan.target.world_size
        yield _change(plan, _sharded(workload, world), overrides=[f"parallel.shard={world}"])


def _together(plan: Plan, leaner: Sequence[Speedup]) -> Iterator[Change]:
    """Yield a set of changes that fits: sharding, speedups, and if necessary fewer rows."""
    chosen: list[Speedup] = []
    workload, available = plan.workload, plan.available or 0
    shards = plan.target.world_size if _can_shard(plan) else 0
    overrides = [f"parallel.shard={shards}"] if shards else []
    workload = _sharded(workload, shards) if shards else workload
    for speedup in leaner:
        more = _with(plan, [*chosen, speedup], shards)
        if more is not None and _saves(plan, more, workload):
            chosen, workload = [*chosen, speedup], more
        if chosen and _need(plan, workload) <= available:
            yield _change(plan, workload, chosen, overrides=overrides)
            return
    batch = _fewer_rows(plan, workload)
    if (chosen or shards) and batch:
        yield _change(plan, workload, chosen, overrides=overrides, batch=batch)


def _can_shard(plan: Plan) -> bool:
    return plan.target.world_size > 1 and plan.workload.num_shards == 1


def _sharded(workload: Workload, count: int) -> Workload:
    return replace(workload, num_shards=count, gradients_stay=False)


def _fewer_rows(plan: Plan, workload: Workload) -> tuple[int, int] | None:
    """Return fewer rows that fit, and the accumulation for the same step."""
    rows, accumulate = plan.batch
    return smaller_batch(workload, rows * accumulate, plan.available or 0, rows - 1)


def _leaner_speedups(plan: Plan) -> Iterator[tuple[Speedup, Workload]]:
    """Yield the speedups that are off, can run, and need less memory."""
    on = {decision.name for decision in plan.decisions if decision.on}
    for speedup in all_speedups():
        if speedup.name not in on and _touches_memory(speedup):
            leaner = _with(plan, [speedup])
            if leaner is not None and _saves(plan, leaner, plan.workload):
                yield speedup, leaner


def _touches_memory(speedup: Speedup) -> bool:
    return any(slot in TOUCH_MEMORY or slot.startswith("ops.") for slot in speedup.fills)


def _with(plan: Plan, speedups: Sequence[Speedup], shards: int = 0) -> Workload | None:
    """Return the workload with more speedups, and perhaps sharded; None when that cannot run."""
    rows, accumulate = plan.batch
    try:
        requested = plan.requested.with_values(
            {
                "speedups": _adding(plan, speedups),
                "batch.tokens_per_step": plan.config.batch.tokens_per_step,
                "batch.rows_per_device": rows,
                "batch.accumulate": accumulate,
                "parallel.shard": shards or plan.config.parallel.shard,
            }
        )
        return workload_of(resolve_for(plan.target, requested, plan.dataset, plan.cache)[0])
    except FlatoutError:
        return None


def _adding(plan: Plan, speedups: Sequence[Speedup]) -> str:
    return adding(plan.requested.speedups, [speedup.name for speedup in speedups])


def _change(
    plan: Plan,
    workload: Workload,
    speedups: Sequence[Speedup] = (),
    *,
    overrides: Sequence[str] = (),
    batch: tuple[int, int] | None = None,
) -> Change:
    """Return the change to more speedups, other settings or another batch."""
    words = [f"speedups={_adding(plan, speedups)}"] if speedups else []
    if batch:
        words += [f"batch.rows_per_device={batch[0]}", f"batch.accumulate={batch[1]}"]
    weak = ", ".join(s.name for s in speedups if s.promise.kind == "statistical")
    need = estimate(workload, *(batch or plan.batch)).total
    return Change(
        (*words, *overrides),
        (_need(plan, plan.workload) - need) / GIB,
        need / GIB,
        need <= (plan.available or 0),
        _speed(plan, speedups, workload),
        f"{weak}: other losses, equal in the mean" if weak else None,
    )


def _need(plan: Plan, workload: Workload) -> int:
    return estimate(workload, *plan.batch).total


def _saves(plan: Plan, leaner: Workload, workload: Workload) -> bool:
    return _need(plan, leaner) < (1 - LEAST_SAVING) * _need(plan, workload)


def _speed(plan: Plan, speedups: Sequence[Speedup], workload: Workload) -> str:
    """Return the measured gains of speedups, or the work that they repeat."""
    gains = gains_here(plan.target.machine, plan.target.device, plan.cache)
    if speedups and all(speedup.name in gains for speedup in speedups):
        each = (f"{speedup.name}: {gains[speedup.name].describe()}" for speedup in speedups)
        return "measured: " + "; ".join(each)
    if any("activations" in speedup.fills for speedup in speedups):
        more = training_flops(workload) / training_flops(plan.workload) - 1
        return f"{more:.0%} more FLOPs, from recomputing; the time is {NOT_MEASURED}"
    return NOT_MEASURED


@lru_cache(maxsize=16)
def training_flops(workload: Workload) -> int:
    """Return the FLOPs of one sequence, forward and backward, with what is recomputed.

    Blocks of one kind are counted once, so that a deep model takes no longer.
    """
    ops = replace(workload.ops, cross_entropy=cross_entropy.fused)  # whole, so that all is counted
    with FakeTensorMode():
        model = workload.model_class(workload.model_config, ops)
        for transform in workload.transforms:
            model = transform(model, None)
        tokens_BT = torch.zeros(1, workload.seq_len, dtype=torch.int64)
        hidden_BTD = torch.zeros_like(model.embed(tokens_BT), requires_grad=True)
        block_of = {repr(block): block for block in model.blocks}
        flops_of = {
            name: _flops_of(partial(block, hidden_BTD, None)) for name, block in block_of.items()
        }

        def loss() -> Tensor:
            normed_BTD, weight_VD = model.head(hidden_BTD)
            return ops.cross_entropy(normed_BTD, weight_VD, tokens_BT)[0]

        ends = _flops_of(partial(model.embed, tokens_BT)) + _flops_of(loss)
    return ends + sum(flops_of[repr(block)] for block in model.blocks)


def _flops_of(call: Callable[[], Tensor]) -> int:
    """Return the FLOPs of a call and of its backward pass."""
    counter = FlopCounterMode(display=False)
    with counter:
        call().sum().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
