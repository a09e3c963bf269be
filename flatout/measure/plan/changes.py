"""What would make a run fit, and what each change costs in speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flatout.assembly.memory import Workload, estimate, smaller_batch
from flatout.assembly.prediction import GIB, gains_here
from flatout.assembly.resolve import resolve, workload_of
from flatout.assembly.selection import Decision, adding, all_speedups, speedup_named
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.errors import FlatoutError, HardwareError
from flatout.hardware import Machine
from flatout.measure.plan.report import Change
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
class Target:
    """The machine and the data that a run is planned for; neither needs to be here."""

    machine: Machine
    device: str
    """cpu or cuda; what the configuration asks for, if this machine has none."""
    world_size: int
    """Processes, one per GPU."""
    dataset: AnyDataset | None
    cache: Path | None
    """Where measurements on this hardware are."""

    @property
    def is_missing(self) -> bool:
        """Whether the machine lacks the device."""
        return self.device.startswith("cuda") and not self.machine.gpus

    def describe(self) -> str:
        """Return the machine in a few words."""
        if self.is_missing:
            return "a GPU that is not here"
        if self.device == "cpu":
            return self.machine.describe().partition(";")[0]
        row, gpu = self.machine.row, self.machine.gpus[0]
        known = f" ({row.name})" if row else " (no data sheet: peak rate and power unknown)"
        return f"{self.world_size}x {gpu.name}{known}"

    def resolve(self, requested: RunConfig) -> tuple[RunConfig, list[Decision]]:
        """Return the configuration as `train` would resolve it there.

        If not even one row fits, the plan is for one row.
        """
        requested = requested.with_values({"train.device": self.device})
        known = partial(
            resolve,
            machine=self.machine,
            dataset=self.dataset,
            world_size=self.world_size,
            cache=self.cache,
        )
        try:
            return known(requested)
        except HardwareError:
            if requested.batch.rows_per_device != "auto":
                raise
            return known(requested.with_values({"batch.rows_per_device": 1}))


@dataclass(frozen=True)
class PlannedRun:
    """A run that may not fit into the memory of its target."""

    target: Target
    requested: RunConfig
    config: RunConfig
    """Resolved for the target."""
    workload: Workload
    available: int = 0
    """Bytes that tensors may take."""

    def changes(self, on: Sequence[str]) -> list[Change]:
        """Return the changes that save memory, the largest saving first; then a set that fits.

        `on` are the speedups that are on. A set is built when no single change is enough: sharding
        over all GPUs, the speedups that save most, one by one, then fewer rows.
        """
        off = [speedup for speedup in all_speedups() if speedup.name not in on]
        slots = {s.name: {"ops" if slot[:4] == "ops." else slot for slot in s.fills} for s in off}
        tried = {name: self._try({}, [name]) for name in slots if TOUCH_MEMORY & slots[name]}
        known = ((name, change) for name, change in tried.items() if change)
        leaner = {name: change for name, change in known if _saves(change, self._need_gib)}
        model = dict(self.workload.model_class.leanest(self.workload.model_config))
        sharding: dict[str, Any] = {}
        if self.target.world_size > 1 and self.workload.num_shards == 1:
            sharding = {"parallel.shard": self.target.world_size}
        singles = [self._try({}, fewer_rows=True), *leaner.values()]
        singles += [
            self._try(values)
            for values in ({f"model.{key}": value for key, value in model.items()}, sharding)
            if values
        ]
        found = [change for change in singles if change and change.saves_gib > 0]
        found.sort(key=lambda change: (not change.fits, change.need_gib))
        if found and found[0].fits:
            return found
        chosen: list[str] = []
        last = self._try(sharding)
        for name in sorted(leaner, key=lambda name: leaner[name].need_gib):
            more = self._try(sharding, [*chosen, name])
            if more and (last is None or _saves(more, last.need_gib)):
                chosen, last = [*chosen, name], more
            if chosen and last and last.fits:
                return [last, *found]
        fewer = self._try(sharding, chosen, fewer_rows=True) if chosen or sharding else None
        return [fewer, *found] if fewer else found

    @property
    def _batch(self) -> tuple[int, int]:
        return int(self.config.batch.rows_per_device), self.config.batch.accumulate or 1

    @property
    def _need_gib(self) -> float:
        return estimate(self.workload, *self._batch).total / GIB

    def _try(
        self, values: Mapping[str, Any], names: Sequence[str] = (), *, fewer_rows: bool = False
    ) -> Change | None:
        """Return the change to other settings and more speedups; None when that cannot run.

        With `fewer_rows`, the micro-batch is the largest smaller one that fits and divides the
        step; None without one.
        """
        values, batch = {**values}, self._batch
        if names:
            values = {"speedups": adding(self.requested.speedups, names), **values}
        step = {
            "batch.tokens_per_step": self.config.batch.tokens_per_step,
            "batch.rows_per_device": batch[0],
            "batch.accumulate": batch[1],
        }
        try:
            config, _ = self.target.resolve(self.requested.with_values(step | values))
            workload = workload_of(config)
        except FlatoutError:
            return None
        if fewer_rows:
            sequences = batch[0] * batch[1]
            rows = smaller_batch(workload, sequences, self.available, batch[0] - 1)
            if not rows:
                return None
            batch = rows, sequences // rows
            values |= {"batch.rows_per_device": rows, "batch.accumulate": batch[1]}
        speedups, target = [speedup_named(name) for name in names], self.target
        weak = ", ".join(s.name for s in speedups if s.promise.kind == "statistical")
        gains, speed = gains_here(target.machine, target.device, target.cache), NOT_MEASURED
        if names and all(name in gains for name in names):
            speed = "measured: " + "; ".join(f"{name}: {gains[name].describe()}" for name in names)
        elif any("activations" in speedup.fills for speedup in speedups):
            more = training_flops(workload) / training_flops(self.workload) - 1
            speed = f"{more:.0%} more FLOPs, from recomputing; the time is {NOT_MEASURED}"
        need = estimate(workload, *batch).total
        return Change(
            overrides=[f"{key}={value}" for key, value in values.items()],
            saves_gib=self._need_gib - need / GIB,
            need_gib=need / GIB,
            fits=need <= self.available,
            speed=speed,
            promise=f"{weak}: other losses, equal in the mean" if weak else None,
        )


def _saves(change: Change, need_gib: float) -> bool:
    return change.need_gib < (1 - LEAST_SAVING) * need_gib


@lru_cache(maxsize=16)
def training_flops(workload: Workload) -> int:
    """Return the FLOPs of one sequence, forward and backward, with what is recomputed.

    Blocks of one kind are counted once, so that a deep model takes no longer.
    """
    ops = replace(workload.ops, cross_entropy=cross_entropy.fused)  # whole, so that all is counted

    def flops_of(call: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()  # type: ignore[no-untyped-call]
        return int(counter.get_total_flops())

    with FakeTensorMode():
        model = workload.model_class(workload.model_config, ops)
        for transform in workload.transforms:
            model = transform(model, None)
        tokens_BT = torch.zeros(1, workload.seq_len, dtype=torch.int64)
        hidden_BTD = torch.zeros_like(model.embed(tokens_BT), requires_grad=True)
        block_of = {repr(block): block for block in model.blocks}
        flops = {
            name: flops_of(partial(block, hidden_BTD, None)) for name, block in block_of.items()
        }

        def loss() -> Tensor:
            normed_BTD, weight_VD = model.head(hidden_BTD)
            return ops.cross_entropy(normed_BTD, weight_VD, tokens_BT)[0]

        ends = flops_of(partial(model.embed, tokens_BT)) + flops_of(loss)
    return ends + sum(flops[repr(block)] for block in model.blocks)
