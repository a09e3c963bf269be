"""Resolves a recipe on this machine as `train` does.

On a GPU that creates a context, which would take memory from the trials. The process that starts
the trials therefore resolves the recipe in another process, which ends afterwards.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flatout.assembly.choices import Decision, adding, parse_request, speedup_named, speedups_for
from flatout.assembly.preflight import open_dataset
from flatout.assembly.resolve import resolve
from flatout.assembly.speedup import uses_gpu
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.distributed.spinning import spin_less_beside_others
from flatout.errors import RunFailed, UsageError
from flatout.hardware.machine import Machine, as_torch_sees, pick_device, probe
from flatout.progress import SILENT, Progress

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Resolved:
    """A resolved recipe, with its machine and dataset."""

    config: RunConfig
    decisions: list[Decision]
    machine: Machine
    dataset: AnyDataset
    additions: Mapping[str, Sequence[str] | str] = field(default_factory=dict)
    """For each speedup that `auto` leaves off: the set with it added, or why it cannot be added."""

    @property
    def speedups(self) -> list[str]:
        """The speedups that are on."""
        return [decision.name for decision in self.decisions if decision.on]

    def stated(self) -> RunConfig:
        """Return the configuration with its speedups written out, for a run of another length."""
        on = [name for name in self.speedups if name not in speedups_for("most_rows")]
        return self.config.with_values({"speedups": on or "none", "train.precision": "auto"})


Chosen = tuple[RunConfig, list[Decision], dict[str, list[str] | str], Machine]
"""A resolved configuration, every speedup, on or off, `Resolved.additions`, and this machine."""


def resolve_here(requested: RunConfig, cache: Path | None = None) -> Resolved:
    """Resolve a recipe for one process on this machine.

    `cache` has the gains measured on this hardware, which `auto` uses. None for no gains.

    Raises: UsageError when it cannot run here.
    """
    machine = probe()
    device, _ = pick_device(requested.train.device, machine)
    on_device = requested.with_values({"train.device": device})
    return resolve_on(as_torch_sees(machine, device), on_device, open_dataset(requested), cache)


def resolve_on(
    machine: Machine, config: RunConfig, dataset: AnyDataset, cache: Path | None = None
) -> Resolved:
    """Resolve a recipe that states its device, as `resolve_here`."""
    resolved = resolve(config, machine=machine, dataset=dataset, world_size=1, cache=cache)
    return Resolved(*resolved, machine, dataset)


def choose(requested: RunConfig, cache: Path | None = None) -> Chosen:
    """Resolve a recipe, and then again for each speedup that is off, with it added.

    Raises: UsageError when it cannot run here.
    """
    resolved = resolve_here(requested, cache)
    is_open = parse_request(requested.speedups).auto
    off = [decision.name for decision in resolved.decisions if is_open and not decision.on]
    additions = {name: adding_one(name, requested, resolved, cache) for name in off}
    return resolved.config, resolved.decisions, additions, resolved.machine


def adding_one(
    name: str, requested: RunConfig, resolved: Resolved, cache: Path | None = None
) -> list[str] | str:
    """Return the speedups that are on after adding `name` and its needs, or why it cannot run."""
    stated = requested.with_values({"train.device": resolved.config.train.device})
    request = adding(requested.speedups, with_needs(name))
    named = stated.with_values({"speedups": request})
    try:
        return resolve_on(resolved.machine, named, resolved.dataset, cache).speedups
    except UsageError as error:
        why = error.what.removeprefix(f"The speedup {name!r} cannot be used: ")
        return f"cannot be added: {why}"


def with_needs(name: str) -> list[str]:
    """Return a speedup, followed by everything it needs."""
    found = [name]
    for part in found:  # it grows during the loop
        found += [need for need in speedup_named(part).needs if need not in found]
    return found


def apart(requested: RunConfig, function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return what a function returns, in another process if the recipe runs on a GPU.

    Raises: RunFailed when the other process died.
    """
    if not uses_gpu(probe(), requested):
        return function(*arguments)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool as error:
        raise RunFailed(
            "The process that resolves the configuration died.",
            fix="Try the same recipe with `flatout train`.",
        ) from error


def resolve_apart(
    requested: RunConfig, cache: Path | None = None, progress: Progress = SILENT
) -> Resolved:
    """Return a resolved recipe with its `additions`, without using the GPU in this process.

    On a CPU, other processes that use its cores are reported.
    Raises: UsageError when it cannot run here; RunFailed when the other process died.
    """
    with progress.task("Resolving the configuration"):
        config, decisions, additions, machine = apart(requested, choose, requested, cache)
        dataset = open_dataset(requested)
    if config.train.device == "cpu":
        spin_less_beside_others(progress)
    return Resolved(config, decisions, machine, dataset, additions)
