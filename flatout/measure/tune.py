"""Finds the fastest setting of a recipe on this machine in bounded time, and writes it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from flatout.assembly.memory import smallest_machine
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.config.documents import dump_yaml
from flatout.config.schema import RunConfig
from flatout.display import terminal_text
from flatout.errors import ConfigError, HardwareError, RunFailed
from flatout.measure.bench import StartTrial, draws_of, facts_of, in_scratch, remember
from flatout.measure.race import LOSS_STEPS, SCREEN, Done, Race, TimeIsUp, require_result
from flatout.measure.resolving import Resolved, resolve_apart
from flatout.measure.results import PARTS, Left, Row, Tuning, measured
from flatout.measure.scripts.request import Timing
from flatout.measure.search import Search
from flatout.measure.settings import Setting, Space, in_order, make_space
from flatout.measure.trial import Result, require_one_process
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import write_text

MARK = "# Written by `flatout tune`"
"""The start of a recipe that tune wrote, which tune may therefore replace."""
SECONDS = 3.0
"""Seconds of measured steps per trial."""
LONGEST_SHARE = 0.25
"""Share of the time after which a trial is ended, and half of it before anything was measured."""
COMMENT_COLUMNS = 98


def run_tune(
    requested: RunConfig,
    *,
    out: Path,
    minutes: float | None = None,
    only: Sequence[str] = PARTS,
    statistical: bool = False,
    cache: Path | None = None,
    progress: Progress = SILENT,
    trial: StartTrial | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Search, write the recipe to `out`, and return what was found.

    Gains of speedups are also kept in `cache`, unless that is None. `auto` then uses them.

    Raises: UsageError before anything is measured; RunFailed when no setting gives results;
            Interrupted when a signal arrives before that.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("tune")
    require_writable(out)
    resolved = resolve_apart(requested, cache, progress)
    space = make_space(requested, resolved, only=only, statistical=statistical)
    if space.obstacle(space.start) is None and not space.moves(space.start):
        raise ConfigError(
            f"There is nothing to tune here in {', '.join(space.only)}.",
            fix="Name other parts with --only, or set speedups=auto.",
        )
    batch = requested.batch
    if "batch" in only and (batch.rows_per_device != "auto" or batch.accumulate):
        progress.say(
            f"The recipe sets {space.start.rows} rows per micro-batch. `tune` varies the rows "
            "and the accumulation, and keeps the tokens per optimizer step."
        )
    with tempfile.TemporaryDirectory(prefix="flatout-trials-") as scratch:
        start, rehearse = _starters(requested, resolved, trial or in_scratch(Path(scratch)))
        total_s = 60 * minutes if minutes is not None else float("inf")
        race = Race(start, total_s=total_s, longest_s=total_s / 2, clock=clock, began_s=start_s,
                    ratio=_over_the_run(resolved.config))  # fmt: skip
        search = Search(
            race,
            space,
            space.start,
            loss_steps=LOSS_STEPS,
            draws=draws_of(resolved.config),
            always_trials=1,  # a rehearsal
        )
        is_rehearsed = False
        with race.running(progress, "Tuning"):
            first_that_runs(search, space)
            if race.results(search.start):
                race.longest_s = max(LONGEST_SHARE * total_s, 3 * race.expected_s(search.start))
                search.run()
                is_rehearsed = confirm(search, rehearse)
    require_figures(search, space, resolved)
    config = tuned_config(requested, resolved, search.best)
    row = Row(
        name=space.name(search.best), kind="best", speedups=in_order(sorted(search.best.speedups))
    )
    row = measured(row, race, search.best)
    row.gain = race.gain(search.best, search.start) if search.taken else None
    found = Tuning(
        **facts_of(race, resolved),
        recipe=requested.name,
        path=str(out),
        began=began,
        tokens_per_step=config.batch.tokens_per_step or 0,
        start=space.name(search.start),
        best=row,
        prefetch=search.best.prefetch,
        precision=config.train.precision,
        is_rehearsed=is_rehearsed,
        changes=search.rows(),
        not_tried=[*{each.name: each for each in (*space.left, *search.left)}.values()],
    )
    comment = terminal_text(found.found(), COMMENT_COLUMNS)
    header = "\n".join(f"# {line}".rstrip() for line in comment.splitlines())
    write_text(out, f"{MARK} on {began[:10]}.\n{header}\n\n{dump_yaml(config.to_dict())}")
    remember(found.changes, found, resolved, cache, progress)
    return found


def _over_the_run(config: RunConfig) -> Callable[[Result, Result], float]:
    """Return how many times faster a run ends, its compilation included, as a function."""
    steps = max(config.train.steps or 1, 1)

    def ratio(one: Result, other: Result) -> float:
        if not (one.compile_s or other.compile_s):
            return one.times_as_fast(other)
        ours, theirs = (
            steps * each.step_ms + 1e3 * (each.compile_s or 0.0) for each in (one, other)
        )
        return theirs / ours

    return ratio


def _starters(
    requested: RunConfig, resolved: Resolved, measure: StartTrial
) -> tuple[Callable[[Setting, int, float], Result], Callable[[Setting, float], Result]]:
    """Return what runs a trial of a setting, and what evaluates and saves with it."""

    def configured(setting: Setting, seed: int) -> RunConfig:
        keys = setting.values(resolved.config.batch.tokens_per_step or 0)
        return requested.with_values({**keys, "train.seed": requested.train.seed + seed})

    def start(setting: Setting, seed: int, limit_s: float) -> Result:
        timing = Timing(
            seconds=SECONDS, first_steps=LOSS_STEPS + 2, warmup_s=3 * SECONDS, limit_s=limit_s / 2
        )
        return measure(configured(setting, seed), timing, limit_s, {})

    def rehearse(setting: Setting, limit_s: float) -> Result:
        besides = {
            "train.eval_every": 1,
            "train.eval_tokens": setting.rows * resolved.config.data.seq_len,
            "checkpoint.every_minutes": None,
            "checkpoint.every_steps": 1,
        }
        return measure(configured(setting, 0), Timing(steps=2, warmup_steps=0), limit_s, besides)

    return start, rehearse


def first_that_runs(search: Search[Setting], space: Space) -> None:
    """Measure what `auto` chose, or where that fails, the nearest setting that can run."""
    race, candidates = search.race, [space.start]
    for setting in candidates:  # it grows during the loop
        why_not = space.obstacle(setting)
        is_out_of_memory = why_not is not None
        if why_not is not None:
            search.left.append(Left(name=space.name(setting), reason=why_not))
        elif not race.failure(setting):
            race.note(space.name(setting))
            result = race.run(setting)
            if result.is_ok:
                search.start = setting
            if result.is_ok or result.status == "timed-out":
                return
            is_out_of_memory = result.status == "out-of-memory"
        if setting == space.start:
            candidates += space.instead(is_out_of_memory)


def confirm(search: Search[Setting], rehearse: Callable[[Setting, float], Result]) -> bool:
    """Race the best setting against the start, and evaluate and save with it.

    A setting that fails, or is not faster than the start after all, gives way to the one before it.
    Returns whether an evaluation and a save were rehearsed.
    """
    race = search.race
    while True:
        best = search.best
        if len(search.taken) > 1:
            race.note(f"{search.space.name(best)} beside {search.space.name(search.start)}")
            try:
                failed = race.compare(best, search.start, least=1.0, rounds=3, reserve=1)
            except TimeIsUp:
                failed = None
            gain = race.gain(best, search.start)
            is_slower = gain is not None and gain.high is not None and gain.high <= 1
            if failed or is_slower:
                search.step_back(failed or "slower in the end")
                continue
        if race.left_s < race.expected_s(best):
            return False
        race.note(f"an evaluation and a save with {search.space.name(best)}")
        result = rehearse(best, min(race.left_s, race.longest_s))
        if result.is_ok:
            return True
        if result.status == "timed-out":
            return False
        if not search.taken:
            # nothing else was faster, but something else may be able to
            race.done = [one for one in race.done if one.setting != best]
            race.done.insert(0, Done(best, SCREEN, 0, result))
            others = [one.after for one in search.tried if race.results(one.after)]
            if not others:
                return False
            search.start = min(others, key=lambda each: race.results(each)[-1].step_ms)
            continue
        search.step_back(f"fails when it evaluates and saves: {result.reason}")


def require_writable(out: Path) -> None:
    """Check, before anything is measured, that tuned.yaml can be written.

    Raises: ConfigError when the path has a different file, or cannot be written.
    """
    other = "Choose a different file with --out FILE."
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


def require_figures(search: Search[Setting], space: Space, resolved: Resolved) -> None:
    """Check that some setting has a result.

    Raises: Interrupted after a signal; HardwareError when nothing fits by estimate; otherwise
            RunFailed, with the last failure.
    """
    race = search.race
    if race.results(search.best):
        return
    smaller = "Shorten data.seq_len or choose a smaller model"
    recipe = assemble(in_order(sorted(space.start.speedups)))
    if machine := smallest_machine(workload_of(resolved.config, recipe)):
        smaller += f", or use a larger machine, such as {machine} (`flatout plan` compares)"
    if not race.done and search.left:
        last_left = search.left[-1]
        what = f"Nothing fits. With {last_left.name}: {last_left.reason}"
        raise HardwareError(what, fix=f"{smaller}.")
    require_result(race)
    failed = [one.result for one in race.done if not one.result.is_ok]
    last = failed[-1]
    fixes = {"timed-out": "Give it more --minutes.", "out-of-memory": f"{smaller}."}
    raise RunFailed(
        f"No setting could be used, and {counted(len(failed), 'trial')} failed. The last one: "
        f"{last.reason}",
        fix=fixes.get(last.status, "Try the same recipe with `flatout train`."),
    )


def tuned_config(requested: RunConfig, resolved: Resolved, best: Setting) -> RunConfig:
    """Return the resolved configuration with a setting, for any number of processes.

    batch.accumulate stays open: it follows from the tokens per step and the number of processes.
    """
    recipe = assemble(in_order(sorted(best.speedups)))
    return resolved.config.with_values(
        best.values(resolved.config.batch.tokens_per_step or 0)
        | {
            "train.precision": recipe.precision.name,
            "parallel.replicate": requested.parallel.replicate,
        }
    )
