"""Finds the fastest setting of a recipe on this machine, in bounded time, and writes it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import yaml

from flatout.assembly.memory import smallest_machine
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, HardwareError, RunFailed
from flatout.files import write_text
from flatout.measure.experiments.losses import Trials
from flatout.measure.experiments.records import PARTS, Best, Choice, Left, Row
from flatout.measure.experiments.report import NO_TIME, Tuning
from flatout.measure.experiments.resolving import Resolved, resolve_apart
from flatout.measure.experiments.results import facts_of, remember
from flatout.measure.experiments.schedule import Budget, RunTrial, Schedule, require_one_process
from flatout.measure.experiments.search import Search, Tried
from flatout.measure.experiments.space import Setting, Space, make_space
from flatout.measure.experiments.trial import run_trial
from flatout.progress import SILENT, Progress, counted
from flatout.training.run import warn_of_busy_cores

MARK = "# Written by `flatout tune`"
"""The start of a recipe that tune wrote, which tune may therefore replace."""


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
) -> Tuning:
    """Search, write the recipe to `out`, and return what was found.

    Gains of speedups are also kept in `cache`, unless that is None; `auto` then uses them.
    Raises: UsageError before anything is measured; RunFailed when no setting gives figures;
            Interrupted when a signal arrives before that.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("tune")
    require_writable(out)
    with progress.task("Resolving the configuration"):
        resolved, additions = resolve_apart(requested, cache)
        space = make_space(requested, resolved, additions, only=only, statistical=statistical)
        require_moves(space)
    if resolved.config.train.device == "cpu":
        warn_of_busy_cores(resolved.machine, progress)
    batch = requested.batch
    if "batch" in only and (batch.rows_per_device != "auto" or batch.accumulate):
        progress.say(
            f"The recipe states {space.start.rows} rows per micro-batch; tune varies the rows and "
            "the accumulation, and keeps the tokens per optimizer step."
        )
    budget = Budget(len(space.moves) + 5, minutes=minutes, repeats=2, began_s=start_s, clock=clock)
    schedule = Schedule(requested, Trials.of(resolved.config), budget, trial)
    search = Search(schedule, space, resolved.config)
    with schedule.running(progress, "Tuning"):
        search.run()
    if schedule.ended_by_signal is not None:
        search.take_best()
    best, start = require_figures(search, resolved), search.start
    config, trials, name = (
        tuned_config(requested, resolved, best),
        schedule.trials,
        search.name(best),
    )
    results = trials.ok(name).values()
    gain = trials.gain(name, search.base, search.base) if best != start else None
    row = trials.measured(Row(name=name, kind="best", speedups=best.in_order()), name)
    late = (Left(name=move.name, reason=NO_TIME) for move in search.late)
    found = Tuning(
        **facts_of(requested, resolved, schedule),
        path=str(out),
        began=began,
        wall_s=round(clock() - start_s, 1),
        tokens_per_step=search.tokens_per_step,
        start=search.name(start or best),
        best=Best(
            **row.model_dump()
            | {
                "gain": gain,
                "verdict": gain.verdict() if gain else "",
                "rows_per_device": best.rows,
                "accumulate": search.tokens_per_step // (best.rows * config.data.seq_len),
                "prefetch": best.prefetch,
                "precision": config.train.precision,
                "rehearsed": sorted({what for result in results for what in result.rehearsed}),
            }
        ),
        choices=[
            choice_of(tried, search) for tried in search.tried if tried.after in search.results
        ],
        not_tried=[*{each.name: each for each in (*space.left, *search.left, *late)}.values()],
    )
    lines = found.lines()
    body = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    header = "\n".join(f"# {line}".rstrip() for line in lines)
    write_text(out, f"{MARK} on {began[:10]}.\n{header}\n\n{body}")
    remember(found, resolved, cache, progress)
    return found.model_copy(update={"text": lines})


def require_writable(out: Path) -> None:
    """Check, before anything is measured, that tuned.yaml can be written.

    Raises: ConfigError when the path has another file, or cannot be written.
    """
    other = "Choose another file with --out FILE."
    if out.is_dir():
        raise ConfigError(f"{out} is a directory.", fix=other)
    try:
        if out.exists() and not out.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise ConfigError(f"{out} exists, and `flatout tune` did not write it.", fix=other)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror or error}.", fix=other) from error


def require_moves(space: Space) -> None:
    """Check that there is something to tune.

    Raises: ConfigError.
    """
    if space.obstacle(space.start) is None and not space.moves_from(space.start):
        raise ConfigError(
            f"There is nothing to tune here in {', '.join(space.only)}.",
            fix="Name other parts with --only, or set speedups=auto.",
        )


def require_figures(search: Search, resolved: Resolved) -> Setting:
    """Return the best setting, once some setting has given figures.

    Raises: Interrupted after a signal; HardwareError when nothing fits by estimate; otherwise
            RunFailed, with the last failure.
    """
    if search.best is not None:
        return search.best
    search.schedule.require_uninterrupted()
    machine = smallest_machine(
        workload_of(resolved.config, assemble(search.space.start.in_order()))
    )
    larger = f", or use a larger machine, such as {machine} (`flatout plan` compares)"
    smaller = f"Shorten data.seq_len or choose a smaller model{larger if machine else ''}."
    failed = [result for result in search.results.values() if not result.is_ok]
    if not failed:
        last_left = search.left[-1]
        raise HardwareError(f"Nothing fits. With {last_left.name}: {last_left.reason}", fix=smaller)
    last = failed[-1]
    fixes = {"timed-out": "Give it more --minutes.", "out-of-memory": smaller}
    raise RunFailed(
        f"No setting could be used, and {counted(len(failed), 'trial')} failed; the last one: "
        f"{last.reason}",
        fix=fixes.get(last.status, "Try the same recipe with `flatout train`."),
    )


def choice_of(tried: Tried, search: Search) -> Choice:
    """Return what was measured about a move."""
    result, parity, move = search.results[tried.after], tried.parity, tried.move
    trials, after, before = (
        search.schedule.trials,
        search.name(tried.after),
        search.name(tried.before),
    )
    kind = "left-out" if move.is_leaving_out else "put-in"
    row = Row(name=move.name, kind=kind, speedup=move.speedup, against=before)
    gain = trials.gain(after, before, search.base) if result.is_ok else None
    failure = result.status + (f": {result.reason}" if result.reason else "")
    return Choice(
        **trials.measured(row, after).model_dump()
        | (parity.fields() if parity else {})
        | {
            "part": move.part,
            "leaves_out": move.is_leaving_out,
            "status": result.status,
            "taken": tried in search.taken,
            "gain": gain,
            "verdict": gain.verdict() if gain else failure,
            "speedups": tried.after.in_order(),
        }
    )


def tuned_config(requested: RunConfig, resolved: Resolved, best: Setting) -> RunConfig:
    """Return the resolved configuration with a setting, for any number of processes.

    batch.accumulate stays open: it follows from the tokens per step and the number of processes.
    """
    recipe = assemble(best.in_order())
    return resolved.config.with_values(
        best.values(resolved.config.batch.tokens_per_step or 0)
        | {
            "train.precision": recipe.precision.name,
            "parallel.replicate": requested.parallel.replicate,
        }
    )
