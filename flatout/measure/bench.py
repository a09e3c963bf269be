"""Measures an ablation of the speedups or a sweep, and keeps the gains that `auto` uses.

The ablation starts at the plain recipe, with a typical hand-written micro-batch
(`recipe.rows_people_write`), adds one speedup at a time up to the set that `train` would use, then
removes each from that set, and adds each one that is off. A sweep measures the full set at several
values of a setting. All of them race in rounds. No torch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any

from flatout.assembly import prediction
from flatout.assembly.prediction import hardware_name, past_run, speedups_on
from flatout.assembly.recipe import divisors
from flatout.assembly.resolve import flops_per_token
from flatout.assembly.selection import Decision, Gain, providers, removing, select
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.display import markdown
from flatout.errors import ConfigError, FlatoutError, RunFailed
from flatout.measure.output import claim, commit_of_package
from flatout.measure.race import LOSS_STEPS, ROUNDS, Done, Race, require_result
from flatout.measure.resolving import Resolved, resolve_apart
from flatout.measure.results import Bench, Row, measured
from flatout.measure.scripts.request import Timing
from flatout.measure.settings import (
    BASELINE,
    Flip,
    filling,
    flips,
    setting_of,
    tolerance_between,
    with_speedups,
)
from flatout.measure.trial import Result, require_one_process, try_recipe
from flatout.models.language_model import model_of
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import sync, unless_broken, write_text
from flatout.storage.json_io import Json, append_line, write_json
from flatout.training.run_dir.resume import run_name

JSON, TABLE, TRIALS = "bench.json", "table.md", "trials.jsonl"
BENCHES = Path("bench")
"""Parent directory of results without --out."""
ABLATION = "ablation"
WHERE = {
    "added": "on the way up",
    "add-one": "added to the full set",
    "leave-one-out": "in the full set",
}
"""Where each kind of row measured a speedup. Later kinds, closer to a real run, take precedence."""
SECONDS, LEAST_SECONDS = 5.0, 1.0
"""Seconds of measured steps per trial, and with a time limit their minimum."""
START_S = 7.0
"""Assumed seconds of a trial besides its measured steps, until one has run."""
LONGEST_S = 900.0
"""A trial is ended after this."""
EVALUATING_S = 1.5
"""Kept for evaluating and writing the results."""
Keys = Mapping[str, Any]
"""Keys that override the requested configuration."""
Points = dict[str, Keys | str]
"""The keys of each point of a sweep, or why it cannot be measured."""
StartTrial = Callable[[RunConfig, Timing, float, Keys], Result]
"""Runs a trial of a configuration, at most for some seconds, with keys for what it does besides."""


def run_bench(
    requested: RunConfig,
    *,
    minutes: float | None = None,
    repeats: int | None = None,
    sweep: str | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
    cache: Path | None = None,
    trial: StartTrial | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Bench:
    """Measure the ablation of a recipe, or a sweep, and return the result.

    bench.json and table.md are written to its directory, and each trial to trials.jsonl when it
    ends. After an interruption, the trials so far are evaluated and written. Gains are also kept in
    `cache` unless that is None.

    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("bench")
    kind, digest = sweep or ABLATION, requested.digest()
    out = results_dir(requested, kind, out)
    resolved = resolve_apart(requested, cache, progress)
    plan = swept(sweep, requested, resolved) if sweep else ablation(requested, resolved)
    claim(out)
    total_s = 60 * minutes - EVALUATING_S if minutes is not None else float("inf")
    with tempfile.TemporaryDirectory(prefix="flatout-trials-") as scratch:
        measure = trial or in_scratch(Path(scratch))

        def start(name: str, seed: int, limit_s: float) -> Result:
            keys = {**plan.points[name], "train.seed": requested.train.seed + seed}
            timing = Timing(
                seconds=plan.seconds,
                first_steps=LOSS_STEPS + 2,
                warmup_s=max(6.0, 3 * plan.seconds),
                limit_s=max(limit_s / 2, 3.0),
            )
            return measure(requested.with_values(keys), timing, limit_s, {})

        race = Race[str](
            start,
            total_s=total_s,
            longest_s=min(LONGEST_S, total_s / 2),
            keep=lambda done: keep(done, [requested.name, kind, digest], began, out),
            clock=clock,
            began_s=start_s,
        )
        with race.running(progress, "Measuring"):
            run_rounds(race, plan, repeats or ROUNDS)
    require_figures(race, out)
    rows = rows_of(plan, race, resolved)
    total = race.gain(*plan.total) if plan.total else None
    result = Bench(
        **facts_of(race, resolved),
        recipe=requested.name,
        path=str(out),
        kind=kind,
        config=requested.to_dict(),
        config_digest=digest,
        began=began,
        minutes=minutes,
        repeats=race.round,
        notes=notes(race, rows, kind),
        rows=rows,
        total=total,
        total_speedup=total and total.median,
    )
    write_json(out / JSON, result.model_dump(mode="json"))
    write_text(out / TABLE, markdown(result.display()) + "\n")
    remember(rows, result, resolved, cache, progress)
    return result


@dataclass
class BenchPlan:
    """What a bench measures."""

    points: dict[str, Keys]
    """The keys of each point, the most important first."""
    absent: dict[str, str]
    """Why something is not measured."""
    flips: tuple[Flip, ...] = ()
    """The rows of an ablation."""
    seconds: float = field(default_factory=lambda: SECONDS)
    """Seconds of measured steps in each trial of the current round."""

    @property
    def same(self) -> dict[str, str]:
        """For each point, the first one with the same keys, which is measured for both."""
        first: dict[str, str] = {}
        return {name: first.setdefault(repr(keys), name) for name, keys in self.points.items()}

    @property
    def late(self) -> set[str]:
        """Points that may be slow, or compile for minutes."""
        return {flip.name for flip in self.flips if flip.kind == "add-one"}

    @property
    def total(self) -> tuple[str, str] | None:
        """The full set and the baseline. None: there is only one of them."""
        full = [flip.name for flip in self.flips if flip.kind == "added"]
        return (self.same[full[-1]], BASELINE) if full else None


def ablation(requested: RunConfig, resolved: Resolved) -> BenchPlan:
    """Return the plan of an ablation.

    The full set comes right after the baseline: even the shortest bench finds the total.
    """
    every = flips(requested, resolved)
    planned = [flip for flip in every if flip.why_not is None]
    full = [flip for flip in planned if flip.kind in ("baseline", "added")][-1]
    points: dict[str, Keys] = {
        flip.name: with_speedups(flip.speedups)
        for flip in dict.fromkeys([planned[0], full, *planned])
    }
    absent = {str(flip.speedup): flip.why_not for flip in every if flip.why_not}
    return BenchPlan(points, absent, tuple(planned))


def swept(sweep: str, requested: RunConfig, resolved: Resolved) -> BenchPlan:
    """Return the plan of a sweep.

    Raises: ConfigError when there is nothing to measure in it.
    """
    found = SWEEPS[sweep](requested, resolved)
    absent = {name: why for name, why in found.items() if isinstance(why, str)}
    if len(absent) == len(found):
        reasons = "; ".join(f"{name}: {why}" for name, why in absent.items())
        raise ConfigError(
            f"--sweep {sweep} has nothing to measure: {reasons}.",
            fix="Sweep a different setting.",
        )
    return BenchPlan({n: keys for n, keys in found.items() if not isinstance(keys, str)}, absent)


def in_scratch(scratch: Path) -> StartTrial:
    """Return a function that trains in fresh run directories below a temporary one."""

    def start(config: RunConfig, timing: Timing, limit_s: float, stated: Keys) -> Result:
        run_dir = Path(tempfile.mkdtemp(dir=scratch)) / "run"
        return try_recipe(config, timing, limit_s, run_dir, stated)

    return start


def run_rounds(race: Race[str], plan: BenchPlan, repeats: int) -> None:
    """Measure every point in rounds, as many as there is time for.

    Neighbours stay neighbours, to be measured close in time. Every round starts at a different
    point, and every other one runs backwards, so that a machine that slows down favours none.

    A point that fails in its first round is not tried again. Late points come last, and with a
    time limit only after two rounds of the others. When not everything fits, the full set, which
    others are compared with, has priority, and then what was never measured.

    Raises: TimeIsUp.
    """
    names, late = [*dict.fromkeys(plan.same.values())], plan.late
    is_limited = race.total_s < float("inf")
    first_late = min(2, repeats - 1) if is_limited else 0
    for number in range(repeats):
        first = number * len(names) * 2 // 5 % len(names)
        due = [
            name
            for name in [*names[first:], *names[:first]][:: -1 if number % 2 else 1]
            if (race.results(name) or not race.failure(name))
            and (number >= first_late or name not in late)
        ]
        if number:
            due.sort(key=lambda name: not race.results(name))
            wanted = sorted(
                due, key=lambda name: (name not in names[1:2], bool(race.results(name)))
            )
            ends_s = accumulate(map(race.expected_s, wanted))
            kept = {
                name for name, end_s in zip(wanted, ends_s, strict=True) if end_s <= race.left_s
            }
            due = [name for name in due if name in kept]
            if len(due) < 2:
                return
        if is_limited:
            # as many rounds as fit, at least two in all, and longer trials with what is left
            spent = [one.result.process_s for one in race.done if one.result.is_ok]
            besides_s = statistics.fmean(spent) - plan.seconds if spent else START_S
            each_s, left = race.left_s / (1.1 * len(due)), repeats - number
            fitting = int(each_s / (besides_s + 2 * LEAST_SECONDS))
            rounds = min(left, max(fitting, 1 if number else 2))
            plan.seconds = max(LEAST_SECONDS, min(each_s / rounds - besides_s, SECONDS))
        race.round += 1
        for index, name in enumerate(sorted(due, key=lambda name: name in late), 1):
            if number == 0 or race.allows(name):
                race.note(f"round {number + 1} of {repeats}, {name} ({index} of {len(due)})")
                race.run(name, race.round, number)


def rows_of(plan: BenchPlan, race: Race[str], resolved: Resolved) -> list[Row]:
    """Return the rows with their results.

    A row that adds a speedup to the previous ones is compared with the nearest one above that was
    measured, every other row of an ablation with the full set only.
    """
    points, known = plan.same, {flip.name: flip for flip in plan.flips}
    draws = draws_of(resolved.config)
    rows = []
    for flip in plan.flips:
        row = Row(
            name=flip.name,
            kind=flip.kind,
            speedup=flip.speedup,
            speedups=list(flip.speedups),
            against=flip.against,
        )
        below = flip.against
        while below and not race.results(points[below]):
            below = known[below].against if flip.kind == "added" else None
        pair = (points[flip.name], points[below or flip.name])
        gain = race.gain(*(pair[::-1] if flip.kind == "leave-one-out" else pair)) if below else None
        if below and gain:
            tolerance = tolerance_between(flip.speedups, known[below].speedups)
            check = race.check(*pair, tolerance, draws=draws)
            row = row.model_copy(update={**check.model_dump(), "against": below, "gain": gain})
            if below != flip.against:
                row.verdict = f"{gain.gain()}, against {below}"
        elif flip.against and not race.results(points[flip.against]):
            row.verdict = f"{flip.against} was not measured"
        rows.append(measured(row, race, points[flip.name]))
    if not plan.flips:
        rows = [measured(Row(name=name, kind="point"), race, name) for name in plan.points]
    return rows + [
        Row(name=name, kind="absent", speedup=name, status="not-measured", reason=why)
        for name, why in plan.absent.items()
    ]


def draws_of(config: RunConfig) -> str | None:
    """Return why the losses of a recipe cannot be compared up to rounding. None: they can."""
    dropout = float(config.model.own().get("dropout") or 0.0)
    return f"model.dropout={dropout:g} draws different random numbers" if dropout else None


def notes(race: Race[str], rows: Sequence[Row], kind: str) -> list[str]:
    """Return notes for the reader on how the results were measured."""
    found = []
    if race.ended_by_signal is not None:
        found.append("The bench was interrupted. These are the trials that had ended by then.")
    counts = [row.repeats for row in rows if row.repeats]
    if counts and min(counts) < max(counts):
        found.append(
            f"Not every line has {max(counts)} repeats: the time was up, or one failed. "
            "n is the number of repeats."
        )
    is_late = any(row.status == "not-measured" and row.kind != "absent" for row in rows)
    if race.ended_by_signal is None and is_late:
        leave_out = ", or remove some: speedups=auto,-NAME" if kind == ABLATION else ""
        found.append(f"There was not enough time for all: add --minutes{leave_out}.")
    timed = [one.result for one in race.done if one.result.is_ok]
    if timed:
        steps = statistics.median(len(result.measured_s) for result in timed)
        before = statistics.median(result.warmup_steps for result in timed)
        found.append(f"A trial measures {steps:.0f} steps after {before:.0f} of warm-up (medians).")
        unsteady = sum(not result.settled for result in timed)
        if unsteady:
            found.append(
                f"In {unsteady} of {len(timed)} trials the step time was not yet steady when the "
                "warm-up had to end."
            )
    return found


def require_figures(race: Race[str], out: Path) -> None:
    """Check that at least one trial gave results.

    Raises: Interrupted after a signal; otherwise RunFailed, with the result of the first trial.
    """
    if not race.done:
        with suppress(OSError):  # it may contain the files of an earlier bench
            out.rmdir()
    require_result(race)
    if any(one.result.is_ok for one in race.done):
        return
    first = race.done[0]
    is_late = first.result.status == "timed-out"
    raise RunFailed(
        f"Nothing was measured: {first.setting}: {first.result.reason} "
        f"All failures are in {out / TRIALS}.",
        fix="Give it more --minutes." if is_late else "Try the same recipe with `flatout train`.",
    )


def facts_of(race: Race[Any], resolved: Resolved) -> dict[str, Any]:
    """Return the fields of a result about what was measured and where."""
    results = (one.result for one in race.done)
    environment = next((result.environment for result in results if result.is_ok), {})
    return {
        "machine": resolved.machine.describe(),
        "environment": {name: environment.get(name) for name in ("torch", "threads", "device")},
        "commit": commit_of_package(),
        **race.facts(),
    }


def results_dir(config: RunConfig, kind: str, out: Path | None) -> Path:
    """Return the results directory: `out`, or the next free bench/RECIPE-DIGEST. It is not created.

    Raises: ConfigError when `out` contains other files, but no bench.
    """
    if out is None:
        stem = run_name(config) + ("" if kind == ABLATION else f"-{kind}")
        names = chain([stem], (f"{stem}-{number}" for number in count(2)))
        return next(path for name in names if not (path := BENCHES / name).exists())
    is_bench = (out / JSON).is_file() or (out / TRIALS).is_file()
    if out.exists() and not is_bench and (not out.is_dir() or any(out.iterdir())):
        what = "contains other files, but no bench" if out.is_dir() else "is a file"
        raise ConfigError(f"{out} {what}.", fix="Choose a new directory with --out DIR.")
    return out


def keep(done: Done[str], bench: Sequence[str], began: str, out: Path) -> None:
    """Append a finished trial to trials.jsonl, so that it survives if this process is killed.

    The file is append-only. `bench` (recipe, kind and digest of the configuration) and `began`
    identify the bench of each line.
    Raises: RunFailed when it cannot be written.
    """
    line: dict[str, Json] = {"bench": bench, "began": began, "point": done.setting}
    line |= {"round": done.round, "result": done.result.model_dump(mode="json")}
    try:
        append_line(out / TRIALS, line)
        sync(out / TRIALS)
        sync(out)
    except OSError as error:
        raise RunFailed(
            f"Cannot write {out / TRIALS}: {error.strerror or error}.",
            fix=unless_broken(error, "Free some space, and run it again."),
        ) from error


def remember(
    rows: Sequence[Row],
    found: Any,
    resolved: Resolved,
    cache: Path | None,
    progress: Progress = SILENT,
) -> None:
    """Store gains in the table of this hardware, from which `auto` chooses.

    Gains without an interval, and those whose losses exceed their tolerance, are omitted. The rate
    of a bench's full set is stored as well: the duration of a run is predicted from it.
    """
    hardware = hardware_name(resolved.machine, resolved.config.train.device)
    flops, run = flops_per_token(resolved.config), None
    gains: dict[str, Gain] = {}
    for row in (row for kind in [*WHERE, "change"] for row in rows if row.kind == kind):
        if not row.speedup or row.gain is None or row.within_tolerance is False:
            continue
        gain = row.gain.inverse() if row.leaves_out else row.gain
        if gain.low is None:
            continue
        gains[row.speedup] = Gain(
            gain=gain.median,
            low=gain.low,
            high=gain.high,
            where=WHERE.get(row.kind) or WHERE["leave-one-out" if row.leaves_out else "add-one"],
            recipe=found.recipe,
            date=found.began,
            commit=found.commit,
            torch=str(found.environment.get("torch", "unknown")),
            flops_per_token=flops,
        )
    full = set(speedups_on(resolved.decisions))
    for row in rows:
        on = speedups_on(Decision(name, True, "") for name in row.speedups)
        if row.kind in WHERE and row.tokens_per_s and set(on) == full:
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


def _batch(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the sequences per micro-batch, doubling from 1 to a whole step, which stays the same."""
    sequences = (resolved.config.batch.tokens_per_step or 0) // resolved.config.data.seq_len
    sizes = {2**power for power in range(sequences.bit_length())} | {sequences}
    return {
        counted(rows, "row"): with_rows(rows, resolved)
        for rows in sorted(sizes)
        if sequences % rows == 0
    }


def _accumulation(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the micro-batches per step from 1 to 8, each of the recipe's size. The step grows."""
    rows, seq_len = int(resolved.config.batch.rows_per_device), resolved.config.data.seq_len
    return {
        counted(n, "micro-batch", "micro-batches"): with_rows(rows, resolved)
        | {"batch.tokens_per_step": n * rows * seq_len}
        for n in (1, 2, 4, 8)
    }


def _seq_len(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the sequence length from a quarter to four times the recipe's.

    The tokens per step and per micro-batch stay the same.
    """
    config, tokens = resolved.config, resolved.config.batch.tokens_per_step or 0
    points: Points = {}
    for length in (config.data.seq_len * factor // 4 for factor in (1, 2, 4, 8, 16)):
        why_not = ""
        try:
            if length < 1 or tokens % length:
                why_not = f"because a step of {tokens} tokens is not a multiple of it."
            elif not resolved.dataset.split("train").num_sequences(length):
                why_not = "because the training text is shorter than one sequence."
            else:
                model_of(requested, vocab_size=config.model.vocab_size, seq_len=length)
        except FlatoutError as error:
            why_not = f"because: {error.what}"
        most = int(config.batch.rows_per_device) * config.data.seq_len // max(length, 1)
        points[counted(length, "token")] = (
            f"cannot run here, {why_not}"
            if why_not
            else {"data.seq_len": length}
            | with_rows(next(divisors(tokens // length, most), 1), resolved)
        )
    return points


def _precision(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the precision of matmuls: fp32, and each speedup that changes it."""
    choices, machine, device = precisions(), resolved.machine, resolved.config.train.device
    requested = requested.with_values({"train.device": device, "train.precision": "auto"})
    without = reduce(lambda speedups, name: removing(name, speedups), choices, requested.speedups)
    stated = requested.with_values({"train.precision": "fp32", "speedups": without})
    plain = [decision.name for decision in select(stated, machine, device=device) if decision.on]
    points: Points = {"fp32": with_speedups(plain)}
    for speedup in map(SPEEDUPS.get, choices):
        others = [one for one in plain if not speedup.fills.keys() & SPEEDUPS.get(one).fills.keys()]
        why_not = speedup.reason_against(machine, requested)
        points[speedup.name] = (
            f"cannot run here, because: {why_not}"
            if why_not
            else with_speedups([*others, speedup.name])
        )
    return points


def _prefetch(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the steps that the data loader reads ahead: none, 1, 2, 4 or 8."""
    loaders = filling("loader")
    others = [name for name in resolved.speedups if name not in loaders]
    ahead: Points = {
        f"{counted(steps, 'step')} ahead": {"data.prefetch": steps}
        | with_speedups([*others, *loaders[:1]])
        for steps in (1, 2, 4, 8)
    }
    return {"no prefetch": with_speedups(others)} | (ahead if loaders else {})


def precisions() -> list[str]:
    """Return the speedups that change the precision of matmuls, grouped by precision."""
    provides = providers()
    return filling("matmul") + [
        name
        for precision in dict.fromkeys(provides.values())
        for name in filling("precision")
        if provides[name] == precision
    ]


def with_rows(rows: int, resolved: Resolved) -> dict[str, Any]:
    """Return the keys for a micro-batch of `rows`, without the speedup that would choose it."""
    setting = replace(setting_of(resolved), rows=rows)
    return setting.values(resolved.config.batch.tokens_per_step or 0)


SWEEPS: Mapping[str, Callable[[RunConfig, Resolved], Points]] = {
    "batch": _batch,
    "seq_len": _seq_len,
    "precision": _precision,
    "accumulation": _accumulation,
    "prefetch": _prefetch,
}
"""The sweeps by name."""
