"""Measures an ablation of the speedups or a sweep, and keeps the gains that `auto` uses.

The ablation starts at the plain recipe, with a typical hand-written micro-batch
(`recipe.rows_people_write`), adds one speedup at a time up to the set that `train` would use, then
removes each from that set, and adds each one that is off. A sweep measures the full set at several
values of a setting. All of them race in rounds. No torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from flatout.assembly.choices import Gain
from flatout.assembly.measured import hardware_name, keep, past_run, speedups_on
from flatout.assembly.resolve import flops_per_token
from flatout.config.schema import RunConfig, parse_overrides
from flatout.display import markdown
from flatout.errors import ConfigError
from flatout.measure.attach.request import Timing
from flatout.measure.intervals import ROUNDS
from flatout.measure.moves import (
    Point,
    Setting,
    ablation,
    in_order,
    setting_of,
    tolerance_between,
)
from flatout.measure.output import require_own
from flatout.measure.race import LOSS_STEPS, Race, Row, absent_row
from flatout.measure.resolving import Resolved, resolve_apart
from flatout.measure.results import Bench, Measurement, facts_of
from flatout.measure.trial import Result, require_one_process, try_recipe
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import write_text
from flatout.storage.json_io import write_json
from flatout.storage.streams import shortened
from flatout.training.run_dir.resume import run_name

JSON, TABLE = "bench.json", "table.md"
BENCHES = Path("bench")
"""Parent directory of results without --out."""
WARM_S = 2.0
"""Seconds of the warm-up of a trial."""
SECONDS, LEAST_SECONDS = 5.0, 1.0
"""Seconds of measured steps per trial, and with a time limit their minimum."""
START_S = 7.0
"""Assumed seconds of a trial besides its measured steps, until one has run."""
LONGEST_S = 900.0
"""A trial is ended after this."""
EVALUATING_S = 1.5
"""Kept for evaluating and writing the results."""
UNMEASURED = ("checkpoint.", "log.", "train.eval_", "train.patience", "train.sample_", "train.seed")
"""Prefixes of keys that no sweep varies: trials set them, since they only time steps."""


def run_bench(
    requested: RunConfig,
    *,
    minutes: float | None = None,
    repeats: int | None = None,
    sweep: str | None = None,
    out: Path | str | None = None,
    progress: Progress = SILENT,
    cache: Path | None = None,
) -> Bench:
    """Measure the ablation of a recipe, or a sweep such as `data.seq_len=256,512`.

    bench.json and table.md are written to a directory. After an interruption, they have the trials
    so far. Gains are also kept in `cache` unless that is None.

    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    start_s = time.monotonic()
    require_one_process("bench")
    swept, folder = values_of(requested, sweep), results_dir(requested, out)
    resolved = resolve_apart(requested, cache, progress)
    every = ablation(requested, resolved)
    if sweep is not None:
        full = setting_of(resolved)
        every = [Point(word, "point", full.but(values)) for word, values in swept.items()]
    points = [point for point in every if point.why_not is None]
    names = {point.after: point.name for point in points[::-1]}
    climb = [point.after for point in points if point.kind in ("baseline", "added")]
    total_s = 60 * minutes - EVALUATING_S if minutes is not None else math.inf
    # with a time limit trials are shorter, so that two rounds fit
    seconds = max(LEAST_SECONDS, min(total_s / (2.2 * len(names)) - START_S, SECONDS))
    race = race_of(
        requested,
        seconds,
        total_s=total_s,
        longest_s=min(LONGEST_S, total_s / 2),
        name=names.__getitem__,
        began_s=start_s,
    )
    with race.running(progress, "Measuring"):
        # even the shortest bench finds the total
        order = dict.fromkeys([*climb[:1], *climb[-1:], *(point.after for point in points)])
        race.rounds([*order], repeats or ROUNDS)
    race.require_result("Try the same recipe with `flatout train`.")
    result = Bench(
        **facts_of(race),
        recipe=requested.name,
        path=str(folder),
        kind=sweep.partition("=")[0] if sweep else "ablation",
        config=requested.to_dict(),
        minutes=minutes,
        repeats=race.round,
        rows=[row_of(point, race) for point in every],
        total=(total := race.gain(climb[-1], climb[0]) if len(climb) > 1 else None),
        total_speedup=total and total.median,
    )
    result = result.model_copy(update={"notes": notes(race, result)})
    folder.mkdir(exist_ok=True)
    write_json(folder / JSON, result.model_dump(mode="json"))
    write_text(folder / TABLE, markdown(result.display()) + "\n")
    remember(result.rows, result, resolved, cache, progress)
    return result


def values_of(requested: RunConfig, sweep: str | None) -> dict[str, dict[str, Any]]:
    """Return the overrides of a sweep, `KEY=VALUE,VALUE`, by their words.

    Raises: ConfigError when there is no such key, a value is not possible, or trials do not measure
            what the key changes.
    """
    key, _, values = (sweep or "").partition("=")
    words = [f"{key}={value}" for value in values.split(",") if value]
    if sweep is not None and (len({*words}) < 2 or key.startswith(UNMEASURED)):
        raise ConfigError(
            f"--sweep {sweep} names no values that trials measure and compare.",
            fix="Name two values and more: --sweep batch.rows_per_device=8,16.",
        )
    found = {word: dict(parse_overrides([word], RunConfig)) for word in words}
    for one in found.values():
        requested.with_values(one)  # raises
    return found


def race_of(requested: RunConfig, seconds: float, **options: Any) -> Race:
    """Return a race of settings of a recipe, which measures so many seconds of steps of each."""

    def start(setting: Setting, seed: int, limit_s: float) -> Result:
        config = requested.with_values({**setting.keys(), "train.seed": first_seed + seed})
        late_s = max(limit_s / 2, 3.0)
        timing = Timing(
            seconds=seconds, first_steps=LOSS_STEPS + 2, warmup_s=WARM_S, limit_s=late_s
        )
        return try_recipe(config, timing, limit_s)

    first_seed, dropout = requested.train.seed, requested.dropout
    draws = f"dropout={dropout:g} draws different random numbers" if dropout else None
    return Race(start, tolerance_between, draws=draws, **options)


def row_of(point: Point, race: Race) -> Row:
    """Return what was measured of a point.

    A row that adds a speedup to the previous ones is compared with the one above, every other row
    of an ablation with the full set.
    """
    name, kind, after, before, speedup, why_not = point
    if why_not is not None:
        return absent_row(name, why_not)
    known = {"kind": kind, "speedup": speedup, "speedups": in_order(after.on)}
    against = race.name(before) if before is not None else None
    row = race.row(after, before, name=name, against=against, **known)
    if kind == "leave-one-out" and row.gain:
        row.gain = row.gain.inverse()
    return row


def notes(race: Race, found: Bench) -> list[str]:
    """Return notes for the reader on how the results were measured."""
    rows = [row for row in found.rows if row.kind != "absent"]
    lines = [f"{r.name}: losses {r.words()}." for r in rows if r.within_tolerance is False]
    if late := [row.name for row in rows if row.status == "not-measured"]:
        lines.append(
            f"{race.stopped_by.capitalize()} before {shortened(late)} had a turn."
            f"{' Add --minutes.' * found.complete}"
        )
    torch, threads = (found.environment.get(name) for name in ("torch", "threads"))
    rounds = f"{counted(found.repeats, 'interleaved round')}, each trial in its own process"
    facts = [found.machine, f"torch {torch}, {threads} threads", rounds, f"commit {found.commit}",
             "medians, gains with 94% intervals", found.began]  # fmt: skip
    return [
        *lines,
        f"{'; '.join(facts)}.",
        f"{found.path}/ has bench.json and table.md; {found.trials}",
    ]


def results_dir(config: RunConfig, out: Path | str | None) -> Path:
    """Return the results directory: `out`, or the next free bench/RECIPE-DIGEST. It is not created.

    Raises: ConfigError when it contains other files, but no bench.
    """
    named = BENCHES / run_name(config)
    more = (named.with_name(f"{named.name}-{number}" if number > 1 else named.name)
            for number in count(1))  # fmt: skip
    out = Path(out or next(path for path in more if not path.exists()))
    require_own(out, is_own=(out / JSON).is_file())
    return out


def remember(
    rows: Sequence[Row],
    found: Measurement,
    resolved: Resolved,
    cache: Path | None,
    progress: Progress = SILENT,
) -> None:
    """Store gains in the table of this hardware, from which `auto` chooses.

    They are those in the full set, or on top of it. Gains without an interval, and those whose
    losses exceed their tolerance, are omitted. The rate of a bench's full set is stored as well:
    the duration of a run is predicted from it.
    """
    config, decisions = resolved.config, resolved.decisions
    hardware = hardware_name(resolved.machine, config.train.device)
    full, run, gains = {*speedups_on(decisions)}, None, dict[str, Gain]()
    for row in rows:
        gain = row.gain.inverse() if row.gain and row.leaves_out else row.gain
        is_right = row.within_tolerance is not False and row.kind != "added"
        if row.speedup and gain and gain.low is not None and is_right:
            is_inside = row.leaves_out or row.kind == "leave-one-out"
            gains[row.speedup] = Gain(
                gain=gain.median,
                low=gain.low,
                high=gain.high,
                where="in the full set" if is_inside else "added to the full set",
                recipe=config.name,
                date=found.began,
                commit=found.commit,
                torch=str(found.environment.get("torch", "unknown")),
                flops_per_token=flops_per_token(config),
            )
        if row.kind == "added" and row.tokens_per_s and {*row.speedups} == full:
            rate = row.tokens_per_s.median
            run = past_run(
                config, decisions, dataset=resolved.dataset, by="bench", tokens_per_s=rate
            )
    if cache is None or hardware is None or not (gains or run):
        return
    try:
        keep(hardware, cache, gains or None, run)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. "
            "`auto` and `flatout list speedups` will not use the measured gains."
        )
