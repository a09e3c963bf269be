"""What would make a run fit, and what each change costs in speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flatout.assembly.auto import all_speedups
from flatout.assembly.capacity import largest_rows
from flatout.assembly.memory import Workload, estimate
from flatout.assembly.prediction import GIB
from flatout.assembly.recipe import Speedup
from flatout.assembly.request import adding
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.errors import FlatoutError
from flatout.measure.planning.plan import Plan, resolve_for
from flatout.measured import gains_here
from flatout.ops import cross_entropy

LEAST_SAVING = 0.02
"""Changes that save less of the memory are left out."""
NOT_MEASURED = "not measured"
TOUCH_MEMORY = {"activations", "moments", "optimizer", "precision"}
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
    promise: str | None = None
    """The promise of its speedups about the losses, if it is weaker than rounding."""


def changes(plan: Plan, cache: Path | None) -> list[Change]:
    """Return the changes that save memory, the largest saving first; then a set that fits.

    A set is built when no single change is enough: the speedups that save most, one by one.
    """
    if plan.memory is None or plan.available is None:
        return []
    leaner = sorted(_leaner_speedups(plan, cache), key=lambda one: _need(plan, one[1]))
    found = [change for change in _single(plan, leaner, cache) if change.saves_gib > 0]
    found.sort(key=lambda change: (not change.fits, change.need_gib))
    if not any(change.fits for change in found):
        together = _together(plan, leaner, cache)
        found = [*([together] if together else []), *found]
    return found


Leaner = Sequence[tuple[Speedup, Workload]]
"""Speedups with the workload that each leads to."""


def _single(plan: Plan, leaner: Leaner, cache: Path | None) -> Iterator[Change]:
    if plan.memory is None or plan.available is None:
        return
    rows, accumulate = _batch(plan)
    fewer = largest_rows(plan.workload, rows * accumulate, plan.available, rows - 1)
    if fewer:
        more = rows * accumulate // fewer
        by_rows = (f"batch.rows_per_device={fewer}", f"batch.accumulate={more}")
        yield _change(plan, by_rows, plan.workload, NOT_MEASURED, batch=(fewer, more))
    for speedup, workload in leaner:
        yield _change(
            plan,
            (f"speedups={adding(plan.requested.speedups, [speedup.name])}",),
            workload,
            _speed(plan, [speedup], workload, cache),
            promise=_weak_promise([speedup]),
        )
    leanest = plan.workload.model_class.leanest(plan.workload.model_config)
    if leanest:
        config = plan.workload.model_config.model_copy(update=dict(leanest))
        overrides = tuple(f"model.{key}={value}" for key, value in leanest.items())
        yield _change(plan, overrides, replace(plan.workload, model_config=config), NOT_MEASURED)
    world = plan.target.world_size
    if world > 1 and plan.workload.num_shards == 1:
        sharded = replace(plan.workload, num_shards=world, gradients_stay=False)
        yield _change(plan, (f"parallel.shard={world}",), sharded, NOT_MEASURED)


def _together(plan: Plan, leaner: Leaner, cache: Path | None) -> Change | None:
    """Return a set of speedups that fits, those with the largest savings first; None if none do."""
    chosen: list[Speedup] = []
    workload = plan.workload
    for speedup, _ in leaner:
        more = _with(plan, [*chosen, speedup], cache)
        if more is None or _need(plan, more) > (1 - LEAST_SAVING) * _need(plan, workload):
            continue
        chosen, workload = [*chosen, speedup], more
        if _need(plan, workload) <= (plan.available or 0):
            names = [speedup.name for speedup in chosen]
            return _change(
                plan,
                (f"speedups={adding(plan.requested.speedups, names)}",),
                workload,
                _speed(plan, chosen, workload, cache),
                promise=_weak_promise(chosen),
            )
    return None


def _leaner_speedups(plan: Plan, cache: Path | None) -> Iterator[tuple[Speedup, Workload]]:
    """Yield the speedups that are off, can run, and need less memory."""
    on = {decision.name for decision in plan.decisions if decision.on}
    need = _need(plan, plan.workload)
    for speedup in all_speedups():
        if speedup.name in on or not _touches_memory(speedup):
            continue
        leaner = _with(plan, [speedup], cache)
        if leaner is not None and _need(plan, leaner) < (1 - LEAST_SAVING) * need:
            yield speedup, leaner


def _touches_memory(speedup: Speedup) -> bool:
    stage = speedup.transform.stage if speedup.transform else ""
    return stage in ("low-precision", "checkpointing") or any(
        slot in TOUCH_MEMORY or slot.startswith("ops.") for slot in speedup.fills
    )


def _with(plan: Plan, speedups: Sequence[Speedup], cache: Path | None) -> Workload | None:
    """Return the workload with more speedups; None when they cannot run together there."""
    names = [speedup.name for speedup in speedups]
    rows, accumulate = _batch(plan)
    try:
        requested = plan.requested.with_values(
            {
                "speedups": adding(plan.requested.speedups, names),
                "batch.tokens_per_step": plan.config.batch.tokens_per_step,
                "batch.rows_per_device": rows,
                "batch.accumulate": accumulate,
            }
        )
        config, decisions = resolve_for(plan.target, requested, plan.dataset, cache)
        return workload_of(config, assemble(decisions))
    except FlatoutError:
        return None


def _change(
    plan: Plan,
    overrides: tuple[str, ...],
    workload: Workload,
    speed: str,
    *,
    batch: tuple[int, int] | None = None,
    promise: str | None = None,
) -> Change:
    need = _need(plan, workload, batch)
    return Change(
        overrides,
        (_need(plan, plan.workload) - need) / GIB,
        need / GIB,
        need <= (plan.available or 0),
        speed,
        promise,
    )


def _need(plan: Plan, workload: Workload, batch: tuple[int, int] | None = None) -> int:
    return estimate(workload, *(batch or _batch(plan))).total


def _batch(plan: Plan) -> tuple[int, int]:
    return int(plan.config.batch.rows_per_device), plan.config.batch.accumulate or 1


def _speed(plan: Plan, speedups: Sequence[Speedup], workload: Workload, cache: Path | None) -> str:
    """Return the measured gains of speedups, or the work that they repeat."""
    gains = gains_here(plan.target.machine, plan.target.device, cache)
    measured = [
        f"{speedup.name}: {gains[speedup.name].describe()}"
        for speedup in speedups
        if speedup.name in gains
    ]
    if len(measured) == len(speedups):
        return "measured: " + "; ".join(measured)
    if any("activations" in speedup.fills for speedup in speedups):
        more = training_flops(workload) / training_flops(plan.workload) - 1
        return f"{more:.0%} more FLOPs, from recomputing; the time is {NOT_MEASURED}"
    return NOT_MEASURED


def _weak_promise(speedups: Sequence[Speedup]) -> str | None:
    weak = [s.name for s in speedups if s.promise.kind == "statistical"]
    return f"{', '.join(weak)}: other losses, equal in the mean" if weak else None


def training_flops(workload: Workload) -> int:
    """Return the FLOPs of one sequence, forward and backward, with what is recomputed."""
    counter = FlopCounterMode(display=False)
    ops = replace(workload.ops, cross_entropy=cross_entropy.fused)  # whole, so that all is counted
    with FakeTensorMode():
        model = workload.model_class(workload.model_config, ops)
        for transform in workload.transforms:
            model = transform(model, None)
        tokens_BT = torch.zeros(1, workload.seq_len, dtype=torch.int64)
        with counter:
            loss_sum, _ = model(tokens_BT, tokens_BT)
            loss_sum.backward()
    return int(counter.get_total_flops())
