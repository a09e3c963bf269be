"""Finds the changes that make a script faster, proves the gain, and writes them as a patch.

Every change that the evidence makes promising is measured beside the unchanged script, in turns,
each in its own process. The winners are added one after the other, the largest gain first, and each
must gain over those before it. In the end, the patched files are measured beside the original ones.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError, OutputInUse, RunFailed
from flatout.files import write_text, write_whole
from flatout.hardware import probe
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.experiments.noise import (
    EXPECTED,
    interval_of,
    pooled,
    spread,
)
from flatout.measure.experiments.records import Figure, Left, LossCheck
from flatout.measure.experiments.report import NO_TIME
from flatout.measure.scripts.changes import CHANGES, edits_of
from flatout.measure.scripts.patch import ByHand, Patch, apply, patch_of
from flatout.measure.scripts.request import Answer, Request, Site, Timing
from flatout.measure.scripts.run import evidence_in, run_script
from flatout.measure.scripts.scratch import Scratch
from flatout.measure.scripts.tuning import CHANGES as SUMMARY
from flatout.measure.scripts.tuning import FILE, ChangeRow, ScriptTuning
from flatout.progress import SILENT, Progress, Task

LOOK_S, TRIAL_S = 3.0, 3.0
"""Seconds of steps with evidence, and of a trial."""
MOST_NOISE = 0.05
"""With a larger difference between unchanged runs, losses are not compared one by one."""
LOSS_STEPS = 20
"""Losses that are compared one by one."""
MIN_STEPS, MAX_STEPS = 12, 400
WARM_STEPS = 4
"""First steps of a trial, which are not timed."""
LEAST_GAIN = 1.01
"""A change is taken from this ratio on."""
PROMISING = 1.005
"""Lower gains of a first trial are not repeated."""
ROUNDS, LAST_ROUNDS = 3, 5
"""Most pairs of a change on top of those before it, and of the patched script."""
SCREEN_SHARE = 0.6
"""Share of the time after which no further change is measured first."""
SEEDS = 3
START_S = 15.0
"""Seconds of a trial beside its steps, until one has run."""


@dataclass(frozen=True)
class Point:
    """What a trial runs: some changes, other arguments, or the patched files."""

    changes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """The command; (): as it was given."""
    is_patched: bool = False
    """Whether the files are patched."""
    seed_offset: int = 0


@dataclass
class Trials:
    """Runs trials of a script in a copy of its directory, and keeps their answers."""

    command: Sequence[str]
    scratch: Scratch
    steps: int
    end_s: float
    """When the time is up, on the monotonic clock."""
    screened_s: float
    """When no further change is measured for the first time: the winners need time as well."""
    longest_s: float
    """A trial is ended after this."""
    task: Task
    patch: Patch | None = None
    """The patch of points that are patched."""
    done: list[tuple[Point, Answer, str]] = field(default_factory=list)
    """With the reason of those that failed, or ""."""
    seconds: dict[Point, float] = field(default_factory=dict)
    noise: list[list[float]] = field(default_factory=list)

    def allows(self, *points: Point) -> bool:
        """Return whether there is time for trials of these points."""
        usual_s = statistics.median(self.seconds.values()) if self.seconds else START_S
        expected_s = sum(self.seconds.get(point, usual_s) for point in points)
        return time.monotonic() + expected_s <= self.end_s

    def run(self, point: Point) -> Answer | None:
        """Run a trial; None if it failed, or took no step."""
        began_s = time.monotonic()
        self.scratch.reset(self.patch.files if self.patch else ())
        if point.is_patched and self.patch is not None:
            apply(self.patch, self.scratch.path)
        environment: dict[str, str] = {}
        for name in point.changes:
            environment |= CHANGES[name].environment
        answer, code, output = run_script(
            [self.scratch.inside(word) for word in point.words or self.command],
            Request(
                changes=point.changes,
                timing=Timing(steps=self.steps, seed_offset=point.seed_offset),
                guarded=self.scratch.guarded,
            ),
            folder=self.scratch.path,
            environment={**environment, "PYTHONHASHSEED": "0"},
            limit_s=self.longest_s,
        )
        reason = ""
        if answer.failed:
            reason = next(iter(answer.failed.values()))
        elif len(answer.step_s) < self.steps and code:
            reason = output.rpartition("\n")[2] or f"exit code {code}"
        elif len(answer.step_s) <= WARM_STEPS:
            reason = answer.problem or "it took too few steps"
            if code is None:
                reason = f"it took longer than {self.longest_s:.0f} s"
        self.done.append((point, answer, reason))
        self.seconds[point] = time.monotonic() - began_s
        return None if reason else answer

    def pairs(
        self, one: Point, other: Point, rounds: int, known: Sequence[float] = ()
    ) -> list[float] | None:
        """Measure two points in turns, until their ratio is decided; return one ratio per round.

        They start with the `known` ones. None: a trial failed. Ratios are how many times faster
        `one` is.
        """
        ratios = [*known]
        for number in range(rounds):
            if number and not self.allows(one, other):
                break
            order = (one, other) if number % 2 else (other, one)
            answers = {point: self.run(point) for point in order}
            first, second = answers[one], answers[other]
            if first is None or second is None:
                return None
            ratios.append(ratio(first, second))
            low, _, high = self.interval(ratios, [*self.noise, ratios])
            if len(ratios) > 1 and (low > LEAST_GAIN or high < LEAST_GAIN):
                break
        self.noise.append(ratios)
        return ratios

    def interval(
        self, ratios: Sequence[float], groups: Sequence[Sequence[float]] | None = None
    ) -> tuple[float, float, float]:
        """Return low, median and high of ratios, with the noise of all that were repeated."""
        noise = pooled([EXPECTED, spread(self.noise if groups is None else groups)])
        return interval_of(ratios, noise)

    def figure(self, ratios: Sequence[float]) -> Figure:
        """Return the median of ratios with its interval."""
        low, median, high = self.interval(ratios)
        return Figure(median=median, low=low, high=high)

    def losses(self, point: Point) -> list[list[float]]:
        """Return the losses of a point's trials."""
        return [answer.losses for each, answer, reason in self.done if each == point and not reason]


def ratio(one: Answer, other: Answer) -> float:
    """Return how many times faster one trial was, over the steps that neither compiled in."""
    steps = min(len(one.step_s), len(other.step_s))
    skipped = {*range(WARM_STEPS), *one.compiled, *other.compiled}
    kept = [index for index in range(steps) if index not in skipped] or range(steps)
    return sum(other.step_s[i] for i in kept) / sum(one.step_s[i] for i in kept)


class Search:
    """The search for the changes that make a script faster."""

    def __init__(self, trials: Trials, names: Sequence[str]) -> None:
        self.trials = trials
        self.rows: dict[str, ChangeRow] = {}
        self.taken: tuple[str, ...] = ()
        self._names = names

    def screen(self) -> None:
        """Measure every change once, between trials of the unchanged script.

        Raises: RunFailed when the unchanged script fails.
        """
        base, pending = Point(), dict[str, Answer]()
        bases = [self._base(), self._base()]
        for name in (*self._names, ""):
            is_due = name and (name != "compile-each-block" or not self._works("compile"))
            has_time = time.monotonic() < self.trials.screened_s
            if is_due and has_time and self.trials.allows(Point((name,)), base):
                self.trials.task.note(f"{name}: {CHANGES[name].does}")
                answer = self.trials.run(Point((name,)))
                reason = f"failed: {self.trials.done[-1][2]}" if answer is None else None
                self.rows[name] = ChangeRow(name=name, does=CHANGES[name].does, reason=reason)
                if answer is not None:
                    pending[name] = answer
            if len(pending) == 2 or (pending and not name):
                before, after = bases[-1], self._base()
                bases.append(after)
                for each, answer in pending.items():
                    self._screened(each, answer, before, after)
                pending.clear()
        self.trials.noise.append([ratio(one, bases[0]) for one in bases[1:]])

    def _screened(self, name: str, answer: Answer, before: Answer, after: Answer) -> None:
        """Note the gain of a change's first trial."""
        self.note(
            name,
            first_gain=statistics.fmean(ratio(answer, base) for base in (before, after)),
            peak_gib=answer.peak_gib,
            compile_s=answer.compile_s,
        )

    def _base(self) -> Answer:
        answer = self.trials.run(Point())
        if answer is None:
            raise RunFailed(
                f"A trial of the unchanged script failed: {self.trials.done[-1][2]}.",
                fix="Run it alone first, twice: trials have no standard input, and start in a copy "
                "of this directory.",
            )
        return answer

    def _works(self, name: str) -> bool:
        return name in self.rows and self.rows[name].reason is None

    def grow_batch(self, flag: str, accumulate_flag: str | None) -> None:
        """Measure larger batches, which are never part of the patch: they are arguments.

        With the argument for accumulation too, it is divided by as much, so that a step has the
        same samples. Without it, the gain is that of samples per second.
        Raises: ConfigError when the command does not have the arguments.
        """
        trials, command = self.trials, list(self.trials.command)
        batch, accumulate = value_at(command, flag), None
        if accumulate_flag is not None:
            accumulate = value_at(command, accumulate_flag)
        for factor in (2, 4, 8, 16):
            words = with_value(command, flag, batch * factor)
            if accumulate is not None and accumulate_flag is not None:
                if accumulate % factor:
                    break
                words = with_value(words, accumulate_flag, accumulate // factor)
            point, before = Point(self.taken, tuple(words)), Point(self.taken)
            if not trials.allows(point, before):
                break
            name = f"{flag} {batch * factor}"
            trials.task.note(name)
            ratios = trials.pairs(point, before, ROUNDS)
            self.rows[name] = ChangeRow(name=name, does="larger batches", against=list(self.taken))
            if ratios is None:
                self.note(name, reason=f"failed: {trials.done[-1][2]}")
                break
            samples = factor if accumulate is None else 1
            gain = trials.figure([samples * each for each in ratios])
            other = "an argument: not in the patch"
            if accumulate is None:
                other = "by samples per second; steps of other batches learn differently"
            self.note(name, gain=gain, reason=other)
            if gain.median < factor**0.1:
                break

    def note(self, name: str, **facts: Any) -> None:
        """Add facts to the row of a change."""
        self.rows[name] = self.rows[name].model_copy(update=facts)

    def add(self) -> None:
        """Add the winners one after the other, the largest gain first."""
        promising = [row for row in self.rows.values() if (row.first_gain or 0.0) >= PROMISING]
        promising.sort(key=lambda row: -(row.first_gain or 0.0))
        for number, name in enumerate([row.name for row in promising]):
            before, point = Point(self.taken), Point((*self.taken, name))
            if EXCLUSIVE.get(name) in self.taken:
                self.note(name, reason=f"{EXCLUSIVE[name]} is taken")
                continue
            # the best in any case; otherwise with as much time for the patch
            if number and not self.trials.allows(point, before, point, before):
                self.note(name, reason="the time was up before it was repeated")
                continue
            self.trials.task.note(f"{name} on top of {', '.join(self.taken) or 'nothing'}")
            check = self.check(Point((name,)), CHANGES[name].rtol)
            self.note(name, **check.model_dump())
            if check.promise_kept is False:
                self.note(name, reason="its losses differ by more than promised")
                continue
            known = () if self.taken else (self.rows[name].first_gain or 1.0,)
            ratios = self.trials.pairs(point, before, ROUNDS, known)
            if ratios is None:
                self.note(name, reason=f"failed with the others: {self.trials.done[-1][2]}")
                continue
            gain = self.trials.figure(ratios)
            is_taken = (gain.low or 0.0) >= LEAST_GAIN
            reason = None if is_taken else "no clear gain" + " on top" * bool(self.taken)
            self.note(name, gain=gain, taken=is_taken, reason=reason, against=list(self.taken))
            if is_taken:
                self.taken = point.changes

    def check(self, point: Point, rtol: float) -> LossCheck:
        """Return whether a point's losses differ by at most `rtol` from those without changes.

        They are compared step by step. Where they differ by more, for example because dropout draws
        other numbers, the mean of the last half decides: it must be within the spread of the
        unchanged script over several seeds.
        """
        trials = self.trials
        if not trials.losses(point) and trials.run(point) is None:
            return LossCheck(
                promise="rounding" if rtol else "exact", promise_reason="not compared: it failed"
            )
        plain, changed = trials.losses(Point()), trials.losses(point)[0]
        apart = difference(changed, plain[0])
        noise = noise_of(plain) or 0.0
        found = LossCheck(
            promise="rounding" if rtol else "exact",
            promise_kept=apart <= rtol + 2 * noise and noise <= MOST_NOISE,
            loss_difference=apart if math.isfinite(apart) else None,
            compared_losses=min(len(changed), len(plain[0]), LOSS_STEPS),
            promise_reason=f"{rtol:.0e} promised, {noise:.0e} between unchanged runs",
        )
        if found.promise_kept or not math.isfinite(apart):
            return found
        seeds = [Point(seed_offset=1000 * number) for number in range(1, SEEDS)]
        for seed in seeds:
            if not trials.losses(seed):
                trials.task.note("the losses with other seeds")
                trials.run(seed)
        unchanged = [losses for seed in (Point(), *seeds) for losses in trials.losses(seed)]
        means = [end_of(losses) for losses in unchanged]
        low, high = min(means), max(means)
        within = low - (high - low) <= end_of(changed) <= high + (high - low)
        reason = (
            f"the mean of the last losses is {end_of(changed):.4f}, and {low:.4f} to {high:.4f}"
        )
        return found.model_copy(
            update={
                "promise": "statistical",
                "promise_kept": within,
                "promise_reason": f"{reason} over {SEEDS} seeds",
            }
        )


EXCLUSIVE = {"prefetch": "data-workers", "compile-each-block": "compile"}
"""Changes that are not added to another one."""


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference between the first losses of two runs."""
    pairs = list(zip(losses, others, strict=False))[:LOSS_STEPS]
    found = (abs(a - b) / max(abs(b), 1e-12) if a != b else 0.0 for a, b in pairs)
    return max((math.inf if math.isnan(each) else each for each in found), default=math.inf)


def end_of(losses: Sequence[float]) -> float:
    """Return the mean of the last half of losses."""
    return statistics.fmean(losses[len(losses) // 2 :])


def tune_script(
    command: Sequence[str],
    *,
    out: Path | str | None = None,
    minutes: float = 10.0,
    only: Sequence[str] = (),
    patch: Path | str | None = None,
    flags: tuple[str | None, str | None] = (None, None),
    progress: Progress = SILENT,
) -> ScriptTuning:
    """Find the changes that make a script faster, and write them as a patch.

    Raises: ConfigError when the directory is too large to be copied; RunFailed when the script
            takes no steps.
    """
    began_s = time.monotonic()
    for flag in filter(None, flags):
        value_at(command, flag)
    out = writable(Path(out or f"tuned-{name_of(command)}"), patch)
    with Scratch(Path.cwd(), command) as scratch, progress.task("Tuning the script") as task:
        task.note("measuring the unchanged script")
        look, code, output = run_script(
            [scratch.inside(word) for word in command],
            Request(seconds=LOOK_S, guarded=scratch.guarded),
            folder=scratch.path,
            limit_s=max(30 * minutes, 120.0),
        )
        name, facts = " ".join(command), look.facts
        if look.evidence is None or look.evidence.failure is not None or (code or 0) > 0:
            print(output, file=sys.stderr)
        if "EOFError" in output.rpartition("\n")[2]:
            fix = "Give its answers as arguments: trials have no standard input."
            raise RunFailed(f"`{name}` reads from standard input.", fix=fix)
        evidence = evidence_in(name, look, code)
        if evidence.failure is not None or facts is None or not evidence.step_s:
            why = evidence.failure.message if evidence.failure else "it cannot be measured"
            raise RunFailed(f"`{name}` fails: {why}.", fix="Repair that first.")
        diagnosis = diagnosis_of(evidence)
        steps = WARM_STEPS + max(MIN_STEPS, min(round(TRIAL_S / evidence.step_s), MAX_STEPS))
        reasons = {name: change.why_not(facts, evidence) for name, change in CHANGES.items()}
        tried = [name for name, why in reasons.items() if (name in only if only else why is None)]
        longest_s = 4 * (time.monotonic() - began_s) + 180
        total_s = 60 * minutes
        ends_s = began_s + total_s, began_s + SCREEN_SHARE * total_s
        trials = Trials(command, scratch, steps, *ends_s, longest_s, task)
        search = Search(trials, tried)
        search.screen()
        search.add()
        if flags[0] is not None:
            search.grow_batch(flags[0], flags[1])
        sites = [
            site.model_copy(update={"file": scratch.original(site.file)}) for site in look.sites
        ]
        found = finished(search, sites, evidence.device)
        reasons |= {name: NO_TIME for name in tried if name not in search.rows}
        scratch.reset(trials.patch.files if trials.patch else ())
        answers = [look, *(answer for _, answer, _ in trials.done)]
        outside = {path: None for answer in answers for path in answer.writes}
        result = ScriptTuning(
            command=list(command),
            machine=probe().describe(),
            verdict=diagnosis.verdict,
            step_ms=1e3 * evidence.step_s,
            steps=steps,
            num_trials=len(trials.done),
            changes=list(search.rows.values()),
            not_tried=[
                Left(name=name, reason=why)
                for name, why in reasons.items()
                if why and name not in search.rows
            ],
            taken=list(search.taken),
            loss_noise=noise_of(trials.losses(Point())),
            written=list(scratch.written),
            written_outside=list(outside),
            path=str(out),
            wall_s=round(time.monotonic() - began_s, 1),
            **found,
        )
    write_results(out, result, trials, diagnosis)
    if patch is not None:
        write_whole(Path(patch), result.patch)  # empty in place of one of an earlier tune
    return result


def writable(out: Path, patch: Path | str | None) -> Path:
    """Return the directory of the results, if it and the patch can be written.

    Raises: ConfigError when their directory is missing; OutputInUse when `out` is something else.
    """
    for path in (out, Path(patch or out)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"There is no directory {path.parent}.", fix="Create it, or name another path."
            )
    if out.exists() and not (out / FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise OutputInUse(
            f"{out} exists and is not of an earlier tune.", fix="Choose another --out."
        )
    return out


def value_at(words: Sequence[str], flag: str) -> int:
    """Return the number that follows an argument, as the next word or after `=`.

    Raises: ConfigError when there is none.
    """
    for word, following in zip(words, (*words[1:], ""), strict=True):
        text = following if word == flag else word.removeprefix(f"{flag}=")
        if (word == flag or word.startswith(f"{flag}=")) and text.isdigit() and int(text):
            return int(text)
    raise ConfigError(
        f"The command has no {flag} with a number.",
        fix=f"Write its present value in the command, such as `{flag} 8`.",
    )


def with_value(words: Sequence[str], flag: str, value: int) -> list[str]:
    """Return the words of a command with another number after an argument."""
    before = ("", *words[:-1])
    return [
        str(value) if last == flag else f"{flag}={value}" if word.startswith(f"{flag}=") else word
        for last, word in zip(before, words, strict=True)
    ]


def name_of(command: Sequence[str]) -> str:
    """Return the name of the script in a command."""
    scripts = [word for word in command if word.endswith(".py")] or command[-1:]
    return Path(scripts[0]).stem or "script"


def noise_of(runs: Sequence[Sequence[float]]) -> float | None:
    """Return the largest relative difference of a loss between runs; None for a single one."""
    return max((difference(one, runs[0]) for one in runs[1:]), default=None)


def finished(search: Search, sites: Sequence[Site], device: str | None) -> dict[str, Any]:
    """Measure all winners together, and the patched files, beside the unchanged script."""
    trials, taken, base = search.trials, search.taken, Point()
    found: dict[str, Any] = dict.fromkeys(
        ("gain", "gain_losses", "verified", "verified_losses", "withheld")
    )
    found |= {"patch": "", "by_hand": []}
    if not taken:
        return found
    edits = {name: edits_of(name, (device or "cpu").partition(":")[0]) for name in taken}
    made = patch_of(edits, sites, trials.scratch.source)
    known = {one.change for one in made.by_hand}
    by_hand = [*made.by_hand]
    for name in taken:
        change = CHANGES[name]
        if not change.edits and name not in known:
            words = " ".join(f"{key}={value}" for key, value in change.environment.items())
            by_hand.append(
                ByHand(change=name, file=None, line=None, words=f"{change.by_hand} {words}".strip())
            )
    found |= {"patch": made.diff, "by_hand": by_hand}
    rtol = sum(CHANGES[name].rtol for name in taken)
    trials.patch = made
    points = {"gain": Point(taken), "verified": Point(is_patched=True)}
    if not by_hand:  # the patch is all of it
        del points["gain"]
    elif not made.diff:
        del points["verified"]
    reason = None
    for key, point in points.items():
        trials.task.note("all winners together" if key == "gain" else "the patched script")
        ratios = trials.pairs(point, base, LAST_ROUNDS)  # at least one, whatever the time is
        if ratios is None:
            reason = trials.done[-1][2]
            continue
        check = search.check(point, rtol)
        found |= {key: trials.figure(ratios), f"{key}_losses": check}
        if check.promise_kept is False:
            reason = "its losses differ by more than promised"
        elif statistics.median(ratios) < 1:
            reason = "it is not faster"
        if not by_hand:
            found |= {"gain": found["verified"], "gain_losses": check}
    if reason:
        found |= {"patch": "", "withheld": f"The patch is not given: {reason}."}
        if not by_hand:
            search.taken = ()
            for name in taken:
                search.note(name, taken=False, reason=f"in the end, {reason}")
    return found


def write_results(out: Path, result: ScriptTuning, trials: Trials, diagnosis: Diagnosis) -> None:
    """Write tuning.json, changes.patch, and the losses and step times before and after."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, result.model_dump_json(indent=1) + "\n")
    (out / "changes.patch").unlink(missing_ok=True)
    if result.patch:
        write_text(out / "changes.patch", result.patch)
    for name, point in (("before", Point()), ("after", Point(tuple(result.taken)))):
        (out / name).mkdir(exist_ok=True)
        done = [answer for each, answer, reason in trials.done if each == point and not reason]
        with (out / name / "metrics.jsonl").open("w", encoding="utf-8") as file:
            both = zip(done[-1].losses[1:], done[-1].step_s, strict=False)
            for step, (loss, step_s) in enumerate(both, 2):
                record = {"step": step, "train/loss": loss, "perf/step_ms": 1e3 * step_s}
                file.write(json.dumps(record) + "\n")
    diagnosis.write(out / "before")
    write_text(out / "after" / SUMMARY, result.summary() + "\n")
