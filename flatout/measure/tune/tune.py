"""Finds the fastest setting of a recipe on this machine, in bounded time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from flatout.assembly.memory import smallest_machine
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, HardwareError, Interrupted, RunFailed, signal_of
from flatout.measure.trials.budget import Budget
from flatout.measure.trials.remember import remember
from flatout.measure.trials.resolving import resolve_apart
from flatout.measure.trials.results import commit_of_package
from flatout.measure.trials.rounds import (
    RunTrial,
    interrupted,
    require_one_process,
)
from flatout.measure.trials.trial import run_trial
from flatout.measure.tune.parts import LEAST_MINUTES, PARTS
from flatout.measure.tune.race import Race
from flatout.measure.tune.report import (
    Tuning,
    gains,
    require_writable,
    tuned_config,
    tuning_of,
    write_recipe,
)
from flatout.measure.tune.search import Search
from flatout.measure.tune.space import Space, make_space
from flatout.progress import SILENT, Progress, counted
from flatout.training.run import warn_of_busy_cores


def run_tune(
    requested: RunConfig,
    *,
    out: Path,
    minutes: float | None = None,
    only: Sequence[str] = PARTS,
    statistical: bool = False,
    cache: Path | None = None,
    progress: Progress = SILENT,
    trial: RunTrial = run_trial,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Tuning, int | None]:
    """Search, write the recipe to `out`, and return the result and the signal that ended it.

    Gains of speedups are also kept in `cache`, unless that is None; `auto` then uses them.
    Raises: UsageError before anything is measured; RunFailed when no setting gives figures;
            Interrupted when a signal arrives before that.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("tune")
    if minutes is not None and minutes < LEAST_MINUTES:
        raise ConfigError(
            f"{minutes:g} minutes are too few to measure a setting.",
            fix=f"Give it at least minutes={LEAST_MINUTES:g}.",
        )
    require_writable(out)
    with progress.task("Resolving the configuration"):
        resolved, additions = resolve_apart(requested, cache)
        space = make_space(requested, resolved, additions, only=only, statistical=statistical)
        require_moves(space)
    if resolved.config.train.device == "cpu":
        warn_of_busy_cores(resolved.machine, progress)
    say_what_stays(requested, space, progress)
    budget = Budget(len(space.moves) + 5, minutes=minutes, repeats=2, began_s=start_s, clock=clock)
    ended_by: int | None = None
    with (
        tempfile.TemporaryDirectory(prefix="flatout-tune-") as scratch,
        progress.task("Tuning") as task,
    ):
        race = Race(requested, resolved, space.start, budget, trial, scratch, task.note)
        search = Search(race, space)
        try:
            search.run()
        except (KeyboardInterrupt, Interrupted) as interruption:
            ended_by = signal_of(interruption)
    if ended_by is not None:
        search.take_best()
    require_figures(search, ended_by)
    facts = {"began": began, "commit": commit_of_package()}
    tuning = tuning_of(search, requested, resolved, facts)
    write_recipe(tuning, tuned_config(requested, resolved, search.best or space.start), out)
    if cache is not None:
        device = resolved.config.train.device
        remember(gains(tuning), resolved.machine, device, cache, progress=progress)
    return tuning, ended_by


def say_what_stays(requested: RunConfig, space: Space, progress: Progress) -> None:
    """Say how tune treats a batch that the recipe states."""
    batch = requested.batch
    if "batch" in space.only and (batch.rows_per_device != "auto" or batch.accumulate):
        progress.say(
            f"The recipe states {space.start.rows} rows per micro-batch; tune varies the rows and "
            "the accumulation, and keeps the tokens per optimizer step."
        )


def require_moves(space: Space) -> None:
    """Check that there is something to tune.

    Raises: ConfigError.
    """
    if space.obstacle(space.start) is None and not space.moves_from(space.start):
        raise ConfigError(
            f"There is nothing to tune here in {', '.join(space.only)}.",
            fix="Name other parts with --only, or set speedups=auto.",
        )


def require_figures(search: Search, ended_by: int | None) -> None:
    """Check that some setting gave figures.

    Raises: Interrupted after a signal; HardwareError when nothing fits by estimate; otherwise
            RunFailed, with the last failure.
    """
    if search.best is not None:
        return
    if ended_by is not None:
        raise interrupted(ended_by)
    failed = [each for each in search.race.results.values() if not each.is_ok]
    if not failed:
        name, reason = search.left[-1].name, search.left[-1].reason
        raise HardwareError(f"Nothing fits. With {name}: {reason}", fix=smaller(search.race))
    last = failed[-1]
    fixes = {
        "timed-out": "Give it more --minutes.",
        "out-of-memory": smaller(search.race),
    }
    raise RunFailed(
        f"No setting could be used, and {counted(len(failed), 'trial')} failed; the last one: "
        f"{last.reason}",
        fix=fixes.get(last.status, "Try the same recipe with `flatout train`."),
    )


def smaller(race: Race) -> str:
    """Return the fix for a recipe of which not even one row fits."""
    recipe = assemble(race.start.in_order())
    machine = smallest_machine(workload_of(race.resolved.config, recipe))
    larger = f", or use a larger machine, such as {machine} (`flatout plan` compares)"
    return f"Shorten data.seq_len or choose a smaller model{larger if machine else ''}."
