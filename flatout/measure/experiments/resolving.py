"""Resolves a recipe on this machine as `train` does.

On a GPU that creates a context, which would take memory from the trials. The process that starts
the trials therefore resolves the recipe in another process, which ends afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.assembly.preflight import open_dataset
from flatout.assembly.recipe import uses_gpu
from flatout.assembly.resolve import resolve
from flatout.assembly.run import Run, build
from flatout.assembly.selection import Decision, adding, parse_request, speedup_named
from flatout.config.schema import RunConfig, validate
from flatout.data.store.mix import AnyDataset
from flatout.distributed.mesh import make_mesh
from flatout.distributed.spinning import spin_less_beside_others
from flatout.errors import RunFailed, UsageError
from flatout.hardware.machine import Machine, pick_device, probe
from flatout.measure.child import Answer, ask
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored


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

    def build(self, config: RunConfig, folder: Path) -> Run:
        """Return the run of this recipe with the settings of `config`."""
        return build(
            config,
            machine=self.machine,
            mesh=make_mesh(config.parallel, config.train.device),
            dataset=self.dataset,
            folder=folder,
            decisions=self.decisions,
        )


class Request(Stored):
    """What another process resolves."""

    config: dict[str, Any]
    """The requested configuration."""
    cache: str | None
    """flatout's cache, with the gains measured here. None means no gains."""


class Chosen(Stored):
    """The choices of a resolved recipe, passed between processes as JSON."""

    config: dict[str, Any]
    """The resolved configuration."""
    decisions: list[Decision]
    """Every speedup, on or off, with the reason."""
    additions: dict[str, list[str] | str]
    """As in `Resolved`."""


def resolve_here(requested: RunConfig, cache: Path | None = None) -> Resolved:
    """Resolve a recipe for one process on this machine.

    `cache` has the gains measured on this hardware, which `auto` uses. None for no gains.

    Raises: UsageError when it cannot run here.
    """
    machine = probe()
    device, _ = pick_device(requested.train.device, machine)
    on_device = requested.with_values({"train.device": device})
    return _resolve(on_device, machine, open_dataset(requested), cache)


def _resolve(
    config: RunConfig, machine: Machine, dataset: AnyDataset, cache: Path | None
) -> Resolved:
    resolved = resolve(config, machine=machine, dataset=dataset, world_size=1, cache=cache)
    return Resolved(*resolved, machine, dataset)


def choose(requested: RunConfig, cache: Path | None = None) -> Chosen:
    """Resolve a recipe, and then again for each speedup that is off, with it added.

    Raises: UsageError when it cannot run here.
    """
    resolved = resolve_here(requested, cache)
    is_open = parse_request(requested.speedups).auto
    off = [decision.name for decision in resolved.decisions if is_open and not decision.on]
    return Chosen(
        config=resolved.config.to_dict(),
        decisions=resolved.decisions,
        additions={name: adding_one(name, requested, resolved, cache) for name in off},
    )


def adding_one(
    name: str, requested: RunConfig, resolved: Resolved, cache: Path | None = None
) -> list[str] | str:
    """Return the speedups that are on after adding `name` and its needs, or why it cannot run."""
    stated = requested.with_values({"train.device": resolved.config.train.device})
    wanted = with_needs(name)
    for part in wanted:
        why_not = speedup_named(part).reason_against(resolved.machine, stated)
        if why_not:
            needed = "" if part == name else f" {part} cannot"
            return f"cannot run here, because{needed}: {why_not}"
    named = stated.with_values({"speedups": adding(requested.speedups, wanted)})
    try:
        return _resolve(named, resolved.machine, resolved.dataset, cache).speedups
    except UsageError as error:
        return f"cannot be added, because: {error.what}"


def with_needs(name: str) -> list[str]:
    """Return a speedup, followed by everything it needs."""
    found = [name]
    for part in found:  # it grows during the loop
        found += [need for need in speedup_named(part).needs if need not in found]
    return found


def resolve_apart(
    requested: RunConfig, cache: Path | None = None, progress: Progress = SILENT
) -> Resolved:
    """Return a resolved recipe with its `additions`, without using the GPU in this process.

    On a CPU, other processes that use its cores are reported.
    Raises: UsageError when it cannot run here; RunFailed when the other process died.
    """
    machine = probe()
    find = choose_in_subprocess if uses_gpu(machine, requested) else choose
    with progress.task("Resolving the configuration"):
        chosen = find(requested, cache)
        config, dataset = validate(chosen.config), open_dataset(requested)
    if config.train.device == "cpu":
        spin_less_beside_others(progress)
    return Resolved(config, chosen.decisions, machine, dataset, chosen.additions)


def choose_in_subprocess(
    requested: RunConfig, cache: Path | None = None, *, command: Sequence[str] = ()
) -> Chosen:
    """Call `choose` in another process. `command` replaces the default command, for tests.

    Raises: whatever `choose` raises there; RunFailed when the process died.
    """
    request, found = Request(config=requested.to_dict(), cache=cache and str(cache)), list[Chosen]()

    def on_answer(line: str) -> bool:
        found.append(Chosen.model_validate_json(line))
        return True

    ended = ask(f"{__name__}:answer", request, on_answer, command=command)
    if not found:
        raise RunFailed(
            f"The process that resolves the configuration died: {ended.last_words}",
            fix="Try the same recipe with `flatout train`.",
        )
    return found[0]


def answer(request: str, answer: Answer) -> None:
    """Answer a request with the choice."""
    asked = Request.model_validate_json(request)
    answer(choose(validate(asked.config), Path(asked.cache) if asked.cache else None))
