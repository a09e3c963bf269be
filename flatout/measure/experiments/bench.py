"""Measures an ablation or a sweep, writes its results, and keeps the gains that `auto` uses.

Repeats are interleaved, each trial runs in a fresh process.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from flatout.assembly import prediction
from flatout.assembly.prediction import hardware_name, past_run, speedups_on
from flatout.assembly.resolve import flops_per_token
from flatout.assembly.selection import Decision, Gain
from flatout.config.registry import PACKAGE_DIR
from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, ConfigError, RunFailed
from flatout.measure.experiments.losses import DETERMINISTIC_STEPS, Trials
from flatout.measure.experiments.points import (
    ABLATION,
    ablation_experiment,
    sweep_experiment,
)
from flatout.measure.experiments.records import Choice, Row, Trial
from flatout.measure.experiments.report import Bench, Tuning
from flatout.measure.experiments.resolving import Resolved, resolve_apart
from flatout.measure.experiments.schedule import (
    Budget,
    Experiment,
    RunTrial,
    Schedule,
    require_one_process,
)
from flatout.measure.experiments.trial import run_trial
from flatout.progress import SILENT, Progress
from flatout.storage.files import sync, unless_broken, write_text
from flatout.storage.json_io import append_line, read_json, read_lines, write_json
from flatout.training.run_dir.resume import run_name

JSON, TABLE, PICTURE, TRIALS = "bench.json", "table.md", "bench.svg", "trials.jsonl"
BENCHES = Path("bench")
"""Parent directory of results without --out."""
WHERE = {
    "added": "on the way up",
    "add-one": "added to the full set",
    "leave-one-out": "in the full set",
}
"""Where each kind of row measured a speedup. Later kinds, closer to a real run, take precedence."""


def run_bench(
    requested: RunConfig,
    *,
    minutes: float | None = None,
    repeats: int | None = None,
    sweep: str | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
    cache: Path | None = None,
    trial: RunTrial = run_trial,
    clock: Callable[[], float] = time.monotonic,
) -> Bench:
    """Measure the ablation of a recipe, or a sweep, and return the result.

    bench.json, table.md and bench.svg are written to its directory, and each trial to trials.jsonl
    when it ends. After an interruption, the trials so far are evaluated and written. Gains are also
    kept in `cache` unless that is None.
    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("bench")
    out = results_dir(requested, sweep or ABLATION, out)
    resolved = resolve_apart(requested, cache, progress)
    experiment = (
        sweep_experiment(sweep, requested, resolved)
        if sweep
        else ablation_experiment(requested, resolved)
    )
    num_points = len(experiment.points)
    budget = Budget(num_points, minutes=minutes, repeats=repeats, began_s=start_s, clock=clock)
    claim(out)
    label, trials = (
        [requested.name, experiment.kind, requested.digest()],
        Trials.of(resolved.config),
    )
    schedule = Schedule(
        requested, trials, budget, trial, lambda ended: keep(ended, label, began, out)
    )
    with schedule.running(progress, "Measuring"):
        schedule.run(experiment)
    require_figures(schedule, out)
    rows = experiment.rows(trials)
    total = trials.gain(*experiment.total) if experiment.total else None
    found = Bench(
        **facts_of(requested, resolved, schedule),
        path=str(out),
        kind=experiment.kind,
        config=requested.to_dict(),
        config_digest=requested.digest(),
        began=began,
        wall_s=round(clock() - start_s, 1),
        minutes=minutes,
        repeats=max(each.round for each in trials.done) + 1,
        notes=notes(experiment, schedule, rows),
        rows=rows,
        total_speedup=total and total.median,
        total_speedup_low=total and total.low,
        total_speedup_high=total and total.high,
    )
    write(found, progress)
    remember(found, resolved, cache, progress)
    return found


def require_figures(schedule: Schedule, out: Path) -> None:
    """Check that at least one trial gave results.

    Raises: Interrupted after a signal; otherwise RunFailed, with the result of the first trial.
    """
    trials = schedule.trials
    if any(trial.result.is_ok for trial in trials.done):
        return
    if not trials.done:
        with suppress(OSError):  # it may contain the files of an earlier bench
            out.rmdir()
    schedule.require_uninterrupted()
    if not trials.done:
        raise RunFailed(
            f"Nothing was measured: {trials.stopped_by} before a trial had ended.",
            fix="Run it again with more time.",
        )
    first = trials.done[0]
    raise RunFailed(
        f"Nothing was measured: {first.point}: {first.result.reason} "
        f"All failures are in {out / TRIALS}.",
        fix="Give it more --minutes."
        if first.result.status == "timed-out"
        else "Try the same recipe with `flatout train`.",
    )


def notes(experiment: Experiment, schedule: Schedule, rows: Sequence[Row]) -> list[str]:
    """Return notes for the reader on how the results were measured."""
    found, done = [], schedule.trials.done
    is_complete = schedule.ended_by_signal is None
    if not is_complete:
        found.append("The bench was interrupted. These are the trials that had ended by then.")
    counts = [row.repeats for row in rows if row.repeats]
    if counts and min(counts) < max(counts):
        found.append(
            f"Not every line has {max(counts)} repeats: the time was up, or one failed. "
            "n is the number of repeats."
        )
    if is_complete and any(row.is_unreached for row in rows):
        leave_out = ", or remove some: speedups=auto,-NAME" if experiment.kind == ABLATION else ""
        found.append(f"There was not enough time for all: add --minutes{leave_out}.")
    if any(trial.deterministic for trial in done):
        found.append(
            "Two runs of one command differ in their last bits here, so exact tolerances were "
            f"checked on {DETERMINISTIC_STEPS} steps of separate, untimed runs with "
            "train.deterministic=true."
        )
    timed = [trial.result for trial in done if trial.result.is_ok and not trial.deterministic]
    if timed:
        steps = statistics.median(result.measured_steps or 0 for result in timed)
        before = statistics.median(result.warmup_steps or 0 for result in timed)
        found.append(f"A trial measures {steps:.0f} steps after {before:.0f} of warm-up (medians).")
        unsteady = sum(result.settled is False for result in timed)
        if unsteady:
            found.append(
                f"In {unsteady} of {len(timed)} trials the step time was not yet steady when the "
                "warm-up had to end."
            )
    return found


def facts_of(requested: RunConfig, resolved: Resolved, schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a result about what was measured and where."""
    results = (trial.result for trial in schedule.trials.done)
    return {
        "recipe": requested.name,
        "machine": resolved.machine.describe(),
        "environment": next((result.environment for result in results if result.is_ok), {}),
        "commit": commit_of_package(),
        "complete": schedule.ended_by_signal is None,
        "ended_by_signal": schedule.ended_by_signal,
        "trials": schedule.trials.done,
    }


def commit_of_package() -> str | None:
    """Return the commit of the checkout, with + if files were changed. None without a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-c", "core.fsmonitor=false", "-C", str(PACKAGE_DIR), *words],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+" if git("status", "--porcelain", "--", ".") else "") if commit else None


def results_dir(config: RunConfig, kind: str, out: Path | None) -> Path:
    """Return the results directory: `out`, or the next free bench/RECIPE-DIGEST. It is not created.

    Raises: ConfigError when `out` contains other files, or the bench of another configuration or
            kind.
    """
    if out is None:
        stem = run_name(config) + ("" if kind == "ablation" else f"-{kind}")
        names = (stem, *(f"{stem}-{number}" for number in range(2, 1_000_000)))
        return next(path for name in names if not (path := BENCHES / name).exists())
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file.", fix="Choose a directory with --out DIR.")
    if not out.is_dir() or not any(out.iterdir()):
        return out
    found: Any = next(read_lines(out / TRIALS), {}).get("bench")
    if not (isinstance(found, list) and [type(part) for part in found] == [str] * 3):
        raise ConfigError(
            f"{out} contains other files, but no bench.",
            fix="Choose a new directory with --out DIR.",
        )
    requested = [config.name, kind, config.digest()]
    if found[1:] != requested[1:]:
        one, other = (
            f"{name} ({what}, configuration {digest[:8]})"
            for name, what, digest in (found, requested)
        )
        raise ConfigError(
            f"{out} contains the bench of {one}. This one is of {other}.",
            fix="Choose a different directory with --out DIR.",
        )
    return out


def claim(out: Path) -> None:
    """Create the results directory before anything is measured.

    Raises: ConfigError when it cannot be created or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"Cannot write {out}: {error.strerror or error}.",
            fix="Choose a writable directory with --out DIR.",
        ) from error


def keep(trial: Trial, bench: list[str], began: str, out: Path) -> None:
    """Append a finished trial to trials.jsonl, so that it survives if this process is killed.

    The file is append-only. `bench` (recipe, kind and digest of the configuration) and `began`
    identify the bench of each line.
    Raises: RunFailed when it cannot be written.
    """
    try:
        append_line(out / TRIALS, {"bench": bench, "began": began, **trial.model_dump(mode="json")})
        sync(out / TRIALS)
        sync(out)
    except OSError as error:
        raise RunFailed(
            f"Cannot write {out / TRIALS}: {error.strerror or error}.",
            fix=unless_broken(error, "Free some space, and run it again."),
        ) from error


def write(found: Bench, progress: Progress = SILENT) -> None:
    """Write bench.json, table.md and bench.svg, each atomically.

    An interrupted bench does not replace one that has more trials.
    """
    out, earlier = Path(found.path), 0
    out.mkdir(parents=True, exist_ok=True)
    if not found.complete and (out / JSON).exists():
        with suppress(CheckpointError, KeyError, TypeError):  # a damaged one may be replaced
            earlier = len(read_json(out / JSON)["trials"])
    if earlier > len(found.trials):
        progress.say(
            f"{out} keeps the report of an earlier bench, which has more trials. "
            f"The new trials are in {out / TRIALS}."
        )
        return
    write_json(out / JSON, found.model_dump(mode="json"))
    write_text(out / TABLE, found.table())
    write_text(out / PICTURE, found.picture())


def remember(
    found: Bench | Tuning, resolved: Resolved, cache: Path | None, progress: Progress = SILENT
) -> None:
    """Store gains in the table of this hardware, from which `auto` chooses.

    The rate of a bench's full set is stored as well: the duration of a run is predicted from it.
    """
    hardware = hardware_name(resolved.machine, resolved.config.train.device)
    flops, run = flops_per_token(resolved.config), None
    gains = {
        name: gain.model_copy(update={"flops_per_token": flops})
        for name, gain in gains_of(found).items()
    }
    full = set(speedups_on(resolved.decisions))
    for row in found.rows if isinstance(found, Bench) else ():
        on = speedups_on(Decision(name, True, "") for name in row.speedups)
        if row.tokens_per_s and set(on) == full:
            rate = row.tokens_per_s.median
            run = past_run(resolved.config, resolved.decisions, by="bench", tokens_per_s=rate)
            break
    if cache is None or hardware is None or not (gains or run):
        return
    try:
        prediction.keep(hardware, cache, gains or None, run)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. "
            "`auto` and `flatout list speedups` will not use the measured gains."
        )


def gains_of(found: Bench | Tuning) -> dict[str, Gain]:
    """Return the gain of each speedup, by name.

    Speedups whose gain has no interval, and those whose losses exceed their tolerance, are omitted.
    """
    gains: dict[str, Gain] = {}
    rows: Sequence[Row] = found.rows if isinstance(found, Bench) else found.choices
    for row in (row for kind in WHERE for row in rows if row.kind == kind):
        gain = row.gain
        if not row.speedup or gain is None or row.within_tolerance is False:
            continue
        low, median, high = gain.low, gain.median, gain.high
        if low is None or high is None:
            continue
        if isinstance(row, Choice) and row.leaves_out:
            low, median, high = 1 / high, 1 / median, 1 / low
        gains[row.speedup] = Gain(
            gain=median,
            low=low,
            high=high,
            where=WHERE[row.kind],
            recipe=found.recipe,
            date=found.began,
            commit=found.commit,
            torch=str(found.environment.get("torch", "unknown")),
        )
    return gains
