"""Measures an ablation of the speedups or a sweep, and keeps the gains that `auto` uses.

The ablation starts at the plain recipe, with a typical hand-written micro-batch
(`recipe.rows_people_write`), adds one speedup at a time up to the set that `train` would use, then
removes each from that set, and adds each one that is off. A sweep measures the full set at several
values of a setting. All of them race in rounds. No torch.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from flatout.assembly.batch import sequences_of
from flatout.assembly.choices import Gain, providers, speedups_for
from flatout.assembly.measured import hardware_name, keep, past_run, speedups_on
from flatout.assembly.parts import divisors
from flatout.assembly.resolve import flops_per_token
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.display import markdown
from flatout.measure.attach.request import Timing
from flatout.measure.intervals import ROUNDS
from flatout.measure.moves import (
    AHEAD,
    ROWS,
    TOKENS,
    Point,
    Setting,
    ablation,
    in_order,
    rows_to_try,
    setting_of,
    tolerance_between,
)
from flatout.measure.output import claim, require_own
from flatout.measure.race import LOSS_STEPS, Done, Race, Row, absent_row
from flatout.measure.resolving import Resolved, resolve_apart
from flatout.measure.results import Bench, Measurement, facts_of
from flatout.measure.trial import Result, require_one_process, try_recipe
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import sync, write_text, writing
from flatout.storage.json_io import Json, append_line, write_json
from flatout.storage.streams import shortened
from flatout.training.run_dir.resume import run_name

JSON, TABLE, TRIALS = "bench.json", "table.md", "trials.jsonl"
BENCHES = Path("bench")
"""Parent directory of results without --out."""
WHERE = {
    "added": "on the way up",
    "add-one": "added to the full set",
    "leave-one-out": "in the full set",
}
"""Where each kind of row measured a speedup. Later kinds, closer to a real run, take precedence."""
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
Points = Mapping[str, Setting]
"""The settings of a sweep."""


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
    """Measure the ablation of a recipe, or a sweep, and return the result.

    bench.json and table.md are written to its directory, and each trial to trials.jsonl when it
    ends. After an interruption, the trials so far are evaluated and written. Gains are also kept in
    `cache` unless that is None.

    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    start_s, began = time.monotonic(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("bench")
    kind, digest = sweep or "ablation", requested.digest()
    folder = results_dir(requested, sweep, out)
    resolved = resolve_apart(requested, cache, progress)
    every = ablation(requested, resolved)
    if sweep:
        every = [Point(name, "point", each) for name, each in SWEEPS[sweep](resolved).items()]
    points = [point for point in every if point.why_not is None]
    names: dict[Any, str] = {point.after: point.name for point in points[::-1]}
    claim(folder)
    total_s = 60 * minutes - EVALUATING_S if minutes is not None else math.inf
    # with a time limit trials are shorter, so that two rounds fit
    seconds = max(LEAST_SECONDS, min(total_s / (2.2 * len(names)) - START_S, SECONDS))
    timing = Timing(seconds=seconds, first_steps=LOSS_STEPS + 2, warmup_s=WARM_S)

    def keep(done: Done) -> None:
        """Append a trial to trials.jsonl, so that it survives if this process is killed."""
        line: dict[str, Json] = {"bench": [requested.name, kind, digest], "began": began}
        line |= {"point": names[done.setting], "round": done.round}
        with writing(folder / TRIALS):
            append_line(
                folder / TRIALS,
                line | {"result": done.result.model_dump(mode="json")},
            )
            sync(folder / TRIALS)
            sync(folder)

    race = Race(
        partial(train, requested, timing),
        tolerance_between,
        total_s=total_s,
        longest_s=min(LONGEST_S, total_s / 2),
        draws=draws_of(resolved.config),
        keep=keep,
        began_s=start_s,
    )
    with race.running(progress, "Measuring"):
        run_rounds(race, points, repeats or ROUNDS)
    if not race.done:
        with suppress(OSError):  # it may contain the files of an earlier bench
            folder.rmdir()
    race.require_result(
        f"Try the same recipe with `flatout train`. {folder / TRIALS} has all trials."
    )
    climb = [one.after for one in points if one.kind in ("baseline", "added")]
    total = race.gain(climb[-1], climb[0]) if len(climb) > 1 else None
    result = Bench(
        **facts_of(race),
        recipe=requested.name,
        path=str(folder),
        kind=kind,
        config=requested.to_dict(),
        config_digest=digest,
        began=began,
        minutes=minutes,
        repeats=race.round,
        rows=[
            *rows_of(points, names, race),
            *(absent_row(point.name, point.why_not) for point in every if point.why_not),
        ],
        total=total,
        total_speedup=total and total.median,
    )
    result = result.model_copy(update={"notes": notes(race, result)})
    write_json(folder / JSON, result.model_dump(mode="json"))
    write_text(folder / TABLE, markdown(result.display()) + "\n")
    remember(result.rows, result, resolved, cache, progress)
    return result


def train(
    requested: RunConfig,
    timing: Timing,
    setting: Setting,
    seed: int,
    limit_s: float,
    **besides: Any,
) -> Result:
    """Run a trial of a recipe with a setting and a seed, in a temporary run directory.

    `besides` are keys for what it does besides training.
    """
    keys = {**setting.keys(), "train.seed": requested.train.seed + seed}
    timing = timing.model_copy(update={"limit_s": max(limit_s / 2, 3.0)})
    with tempfile.TemporaryDirectory(prefix="flatout-trial-") as folder:
        config, run_dir = requested.with_values(keys), Path(folder) / "run"
        return try_recipe(config, timing, limit_s, run_dir, besides)


def run_rounds(race: Race, points: Sequence[Point], repeats: int) -> None:
    """Measure every setting in rounds, as many as there is time for.

    Neighbours stay neighbours, to be measured close in time. Every other round runs backwards, so
    that a machine that slows down favours none. A setting that fails in its first round is not
    tried again. When not everything fits, the baseline and the full set have priority, and then
    what was never measured.

    Raises: TimeIsUp.
    """
    climb = [point.after for point in points if point.kind in ("baseline", "added")]
    # even the shortest bench finds the total
    order = [*dict.fromkeys([*climb[:1], *climb[-1:], *(point.after for point in points)])]
    for number in range(repeats):
        due = [one for one in order if race.results(one) or not race.failure(one)]
        due.sort(key=lambda one: (one not in order[:2], bool(race.results(one))))
        while number and due and not race.allows(*due):
            due.pop()
        if len(due) < 2 and number:
            return
        race.round += 1
        due.sort(key=lambda one: order.index(one) * (-1) ** number)
        for at, one in enumerate(due, 1):
            race.note(f"round {number + 1} of {repeats}, {at} of {len(due)}")
            if not number or race.allows(one):
                race.run(one, race.round, number)


def rows_of(points: Sequence[Point], names: Mapping[Setting, str], race: Race) -> Iterator[Row]:
    """Yield the rows with their results.

    A row that adds a speedup to the previous ones is compared with the nearest one above that was
    measured, every other row of an ablation with the full set only.
    """
    measured: Setting | None = None
    for name, kind, after, before, speedup, _ in points:
        if kind == "added" and before is not None and not race.results(before):
            before = measured
        row = race.row(
            after,
            before,
            name=name,
            kind=kind,
            speedup=speedup,
            speedups=in_order(after.on),
            against=names[before] if before is not None else None,
        )
        if kind == "leave-one-out" and row.gain:
            row.gain = row.gain.inverse()
        measured = after if race.results(after) else measured
        yield row


def draws_of(config: RunConfig) -> str | None:
    """Return why the losses of a recipe cannot be compared up to rounding. None: they can."""
    dropout = float(config.model.own().get("dropout") or 0.0)
    return f"model.dropout={dropout:g} draws different random numbers" if dropout else None


def notes(race: Race, found: Bench) -> list[str]:
    """Return notes for the reader on how the results were measured."""
    rows = [row for row in found.rows if row.kind != "absent"]
    lines = [f"{r.name}: {r.reason}" for r in rows if r.status not in ("ok", "not-measured")]
    lines += [f"{r.name}: losses {r.words()}." for r in rows if r.within_tolerance is False]
    if late := [row.name for row in rows if row.status == "not-measured"]:
        lines.append(
            f"{race.stopped_by.capitalize()} before {shortened(late)} had a turn."
            f"{' Add --minutes.' * found.complete}"
        )
    torch, threads = (found.environment.get(name) for name in ("torch", "threads"))
    rounds = f"{counted(found.repeats, 'interleaved round')}, each trial in its own process"
    facts = [found.machine, f"torch {torch}, {threads} threads", rounds, f"commit {found.commit}",
             "medians, gains with 94% intervals", found.began]  # fmt: skip
    files = f"{found.path}/ has table.md, bench.json and trials.jsonl; {found.trials}"
    return [*lines, f"{'; '.join(facts)}.", files]


def results_dir(config: RunConfig, sweep: str | None, out: Path | str | None) -> Path:
    """Return the results directory: `out`, or the next free bench/RECIPE-DIGEST. It is not created.

    Raises: ConfigError when it contains other files, but no bench.
    """
    named = BENCHES / "-".join(filter(None, (run_name(config), sweep)))
    more = (named.with_name(f"{named.name}-{number}") for number in count(2))
    out = Path(out or next(path for path in chain([named], more) if not path.exists()))
    require_own(out, is_own=(out / JSON).is_file() or (out / TRIALS).is_file())
    return out


def remember(
    rows: Sequence[Row],
    found: Measurement,
    resolved: Resolved,
    cache: Path | None,
    progress: Progress = SILENT,
) -> None:
    """Store gains in the table of this hardware, from which `auto` chooses.

    Gains without an interval, and those whose losses exceed their tolerance, are omitted. The rate
    of a bench's full set is stored as well: the duration of a run is predicted from it.
    """
    config, hardware = (
        resolved.config,
        hardware_name(resolved.machine, resolved.config.train.device),
    )
    full, run, gains = {*speedups_on(resolved.decisions)}, None, dict[str, Gain]()
    for row in sorted(rows, key=lambda row: [*WHERE, row.kind].index(row.kind)):
        gain = row.gain.inverse() if row.gain and row.leaves_out else row.gain
        if row.speedup and gain and gain.low is not None and row.within_tolerance is not False:
            of_a_change = WHERE["leave-one-out" if row.leaves_out else "add-one"]
            gains[row.speedup] = Gain(
                gain=gain.median,
                low=gain.low,
                high=gain.high,
                where=WHERE.get(row.kind, of_a_change),
                recipe=config.name,
                date=found.began,
                commit=found.commit,
                torch=str(found.environment.get("torch", "unknown")),
                flops_per_token=flops_per_token(config),
            )
        if run is None and row.kind in WHERE and row.tokens_per_s and {*row.speedups} == full:
            rate = row.tokens_per_s.median
            run = past_run(config, resolved.decisions, by="bench", tokens_per_s=rate)
    if cache is None or hardware is None or not (gains or run):
        return
    try:
        keep(hardware, cache, gains or None, run)
    except OSError as error:
        progress.say(
            f"Cannot write {cache}: {error.strerror or error}. "
            "`auto` and `flatout list speedups` will not use the measured gains."
        )


def _batch(resolved: Resolved) -> Points:
    """Vary the sequences per micro-batch, doubling from 1 to a whole step, which stays the same."""
    start = setting_of(resolved)
    every = rows_to_try(1, sequences_of(resolved.config))
    return {counted(rows, "row"): start.but({ROWS: rows}) for rows in every}


def _accumulation(resolved: Resolved) -> Points:
    """Vary the micro-batches per step from 1 to 8, each of the recipe's size. The step grows."""
    start = setting_of(resolved)
    tokens = start.rows * resolved.config.data.seq_len
    return {
        counted(n, "micro-batch", "micro-batches"): start.but({TOKENS: n * tokens})
        for n in (1, 2, 4, 8)
    }


def _seq_len(resolved: Resolved) -> Points:
    """Vary the sequence length from a quarter to four times the recipe's.

    The tokens per step and per micro-batch stay the same. A length that is not possible fails.
    """
    start, length = setting_of(resolved), resolved.config.data.seq_len
    tokens, points = resolved.config.batch.tokens_per_step or 0, {}
    for each in (length // 4, length // 2, length, 2 * length, 4 * length):
        rows = next(divisors(tokens // each, start.rows * length // each), 1) if each else 1
        points[counted(each, "token")] = start.but({"data.seq_len": each, ROWS: rows})
    return points


def _precision(resolved: Resolved) -> Points:
    """Vary the precision of matmuls: fp32, and each speedup that changes it."""
    plain = frozenset(resolved.speedups) - {*precisions()}
    points = {"fp32": Setting(plain)}
    for name in precisions():
        sets = SPEEDUPS.get(name).sets
        others = {one for one in plain if not sets & SPEEDUPS.get(one).sets}
        points[name] = Setting(frozenset({*others, name}))
    return points


def _prefetch(resolved: Resolved) -> Points:
    """Vary the steps that the data loader reads ahead: none, 1, 2, 4 or 8."""
    loaders = speedups_for("loader")
    others = Setting(frozenset(resolved.speedups) - {*loaders})
    ahead = Setting(others.on | {*loaders[:1]})
    return {"no prefetch": others} | {
        f"{counted(steps, 'step')} ahead": ahead.but({AHEAD: steps})
        for steps in (1, 2, 4, 8)
        if loaders
    }


def precisions() -> list[str]:
    """Return the speedups that change the precision of matmuls, grouped by precision."""
    provides = providers()
    return speedups_for("matmul") + [
        name
        for precision in dict.fromkeys(provides.values())
        for name in speedups_for("precision")
        if provides[name] == precision
    ]


SWEEPS: Mapping[str, Callable[[Resolved], Points]] = {
    "batch": _batch,
    "seq_len": _seq_len,
    "precision": _precision,
    "accumulation": _accumulation,
    "prefetch": _prefetch,
}
"""The sweeps by name."""
