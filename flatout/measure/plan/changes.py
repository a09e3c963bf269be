"""What would make a run fit, and what each change costs in speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flatout.assembly.memory import Workload, estimate, smaller_batch
from flatout.assembly.prediction import GIB, gains_here, speedups_on
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import adding, all_speedups, speedup_named
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
    "ops",
    "optimizer",
    "precision",
}
"""Slots of speedups that may need less memory."""


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
    on, leaner = speedups_on(plan.decisions), dict[str, Workload]()
    for speedup in all_speedups():
        if speedup.name not in on and TOUCH_MEMORY & {
            "ops" if slot.startswith("ops.") else slot for slot in speedup.fills
        }:
            workload = _with(plan, [speedup.name])
            if workload is not None and _saves(plan, workload, plan.workload):
                leaner[speedup.name] = workload
    leaner = dict(sorted(leaner.items(), key=lambda one: _need(plan, one[1])))
    found = [change for change in _single(plan, leaner) if change.saves_gib > 0]
    found.sort(key=lambda change: (not change.fits, change.need_gib))
    if not any(change.fits for change in found):
        found = [*_together(plan, leaner), *found]
    return found


def _single(plan: Plan, leaner: Mapping[str, Workload]) -> Iterator[Change]:
    """Yield changes by fewer rows, one of the speedups, the model's settings, or sharding."""
    workload = plan.workload
    if rows := _fewer_rows(plan, workload):
        yield _change(plan, workload, rows=rows)
    for name, with_speedup in leaner.items():
        yield _change(plan, with_speedup, [name])
    if leanest := dict(workload.model_class.leanest(workload.model_config)):
        config = workload.model_config.model_copy(update=leanest)
        overrides = [f"model.{key}={value}" for key, value in leanest.items()]
        yield _change(plan, replace(workload, model_config=config), overrides=overrides)
    if shards := _more_shards(plan):
        yield _change(plan, _sharded(workload, shards), overrides=[f"parallel.shard={shards}"])


def _together(plan: Plan, leaner: Iterable[str]) -> Iterator[Change]:
    """Yield a set of changes that fits: sharding, speedups, and if necessary fewer rows."""
    chosen: list[str] = []
    shards = _more_shards(plan)
    overrides = [f"parallel.shard={shards}"] if shards else []
    workload = _sharded(plan.workload, shards) if shards else plan.workload
    for name in leaner:
        more = _with(plan, [*chosen, name], shards)
        if more is not None and _saves(plan, more, workload):
            chosen, workload = [*chosen, name], more
        if chosen and _need(plan, workload) <= (plan.available or 0):
            yield _change(plan, workload, chosen, overrides=overrides)
            return
    rows = _fewer_rows(plan, workload)
    if (chosen or shards) and rows:
        yield _change(plan, workload, chosen, overrides=overrides, rows=rows)


def _more_shards(plan: Plan) -> int:
    """Return over how many GPUs the model could be sharded; 0 if it is, or there is one."""
    world_size = plan.target.world_size
    return world_size if world_size > 1 and plan.workload.num_shards == 1 else 0


def _sharded(workload: Workload, count: int) -> Workload:
    return replace(workload, num_shards=count, gradients_stay=False)


def _fewer_rows(plan: Plan, workload: Workload) -> int | None:
    """Return fewer rows that fit and divide the step."""
    rows, accumulate = plan.batch
    return smaller_batch(workload, rows * accumulate, plan.available or 0, rows - 1)


def _with(plan: Plan, names: Sequence[str], shards: int = 0) -> Workload | None:
    """Return the workload with more speedups, and perhaps sharded; None when that cannot run."""
    rows, accumulate = plan.batch
    try:
        requested = plan.requested.with_values(
            {
                "speedups": adding(plan.requested.speedups, names),
                "batch.tokens_per_step": plan.config.batch.tokens_per_step,
                "batch.rows_per_device": rows,
                "batch.accumulate": accumulate,
                "parallel.shard": shards or plan.config.parallel.shard,
            }
        )
        return workload_of(resolve_for(plan.target, requested, plan.dataset, plan.cache)[0])
    except FlatoutError:
        return None


def _change(
    plan: Plan,
    workload: Workload,
    names: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    rows: int | None = None,
) -> Change:
    """Return the change to more speedups, other settings or another batch."""
    words = [f"speedups={adding(plan.requested.speedups, names)}"] if names else []
    batch = plan.batch
    if rows:
        batch = rows, batch[0] * batch[1] // rows
        words += [f"batch.rows_per_device={rows}", f"batch.accumulate={batch[1]}"]
    speedups = [speedup_named(name) for name in names]
    weak = ", ".join(s.name for s in speedups if s.promise.kind == "statistical")
    need = estimate(workload, *batch).total
    gains, speed = gains_here(plan.target.machine, plan.target.device, plan.cache), NOT_MEASURED
    if names and all(name in gains for name in names):
        speed = "measured: " + "; ".join(f"{name}: {gains[name].describe()}" for name in names)
    elif any("activations" in speedup.fills for speedup in speedups):
        more = training_flops(workload) / training_flops(plan.workload) - 1
        speed = f"{more:.0%} more FLOPs, from recomputing; the time is {NOT_MEASURED}"
    return Change(
        (*words, *overrides),
        (_need(plan, plan.workload) - need) / GIB,
        need / GIB,
        need <= (plan.available or 0),
        speed,
        f"{weak}: other losses, equal in the mean" if weak else None,
    )


def _need(plan: Plan, workload: Workload) -> int:
    return estimate(workload, *plan.batch).total


def _saves(plan: Plan, leaner: Workload, workload: Workload) -> bool:
    return _need(plan, leaner) < (1 - LEAST_SAVING) * _need(plan, workload)


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
