"""Where results go: the directory of a bench, and the cache, where `auto` finds measured gains."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.assembly import prediction
from flatout.assembly.prediction import hardware_name, past_run, speedups_on
from flatout.assembly.selection import Decision, Gain
from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, ConfigError, RunFailed
from flatout.files import sync, unless_broken, write_text
from flatout.json_io import append_line, read_json, read_lines, write_json
from flatout.measure.experiments.records import Choice, Row, Trial
from flatout.measure.experiments.report import Bench, Tuning
from flatout.measure.experiments.resolving import Resolved
from flatout.measure.experiments.schedule import Schedule
from flatout.progress import SILENT, Progress
from flatout.registry import PACKAGE_DIR
from flatout.training.run_dir.layout import run_name

JSON, TABLE, PICTURE, TRIALS = "bench.json", "table.md", "bench.svg", "trials.jsonl"
BENCHES = Path("bench")
"""Parent directory of results without --out."""
WHERE = {"added": "on the way up", "put-in": "put into the full set", "left-out": "in the full set"}
"""Where each kind of row measured a speedup; later kinds, closer to a real run, take precedence."""


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
    """Return the commit of the checkout, with + if files were changed; None without a checkout."""

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
    """Return the results directory: `out`, or the next free bench/RECIPE-DIGEST; it is not created.

    Raises: ConfigError when `out` contains other files, or the bench of another configuration or
            kind.
    """
    if out is None:
        stem = run_name(config) + ("" if kind == "ladder" else f"-{kind}")
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
            f"{out} contains the bench of {one}; this one is of {other}.",
            fix="Choose another directory with --out DIR.",
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

    The file is append-only; `bench` (recipe, kind and digest of the configuration) and `began`
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
            f"{out} keeps the report of an earlier bench, which has more trials; "
            f"the new trials are in {out / TRIALS}."
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
    gains, run = gains_of(found), None
    full = set(speedups_on(resolved.decisions))
    for row in found.rungs if isinstance(found, Bench) else ():
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

    Speedups whose gain has no interval, and those whose losses broke their promise, are left out.
    """
    gains: dict[str, Gain] = {}
    rows: Sequence[Row] = found.rungs if isinstance(found, Bench) else found.choices
    for row in (row for kind in WHERE for row in rows if row.kind == kind):
        gain = row.gain
        if not row.speedup or gain is None or row.promise_kept is False:
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
