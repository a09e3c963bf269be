"""Finds the changes that make a script faster, proves the gain, and writes them as a patch.

Every change that the evidence makes promising is measured once beside the unchanged script, each in
its own process, which only orders them. Those that look faster are measured again in turns, the
best first, and each must gain over those before it. In the end, the patched files are measured
beside the original ones: that alone is what is claimed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError, Interrupted, OutputInUse, RunFailed, signal_of
from flatout.hardware.machine import probe
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.experiments.losses import LOSS_STEPS, largest_difference, paired
from flatout.measure.experiments.noise import Spread, interval_of, pooled, spread
from flatout.measure.experiments.records import INTERRUPTED, Figure, Left, LossCheck
from flatout.measure.experiments.report import NO_TIME
from flatout.measure.scripts.changes import CHANGES, edit_of
from flatout.measure.scripts.patch import Patch, apply, patch_of
from flatout.measure.scripts.request import Answer, Facts, Request, Site, Timing
from flatout.measure.scripts.run import evidence_in
from flatout.measure.scripts.scratch import Scratch
from flatout.measure.scripts.tuning import CHANGES as SUMMARY
from flatout.measure.scripts.tuning import FILE, UNPROVEN, ChangeRow, ScriptTuning, figure_text
from flatout.measure.steps.evidence import Evidence
from flatout.measure.trial import last_words, run_command
from flatout.progress import SILENT, Progress, Task
from flatout.storage.files import write_text, write_whole

LOOK_S, TRIAL_S = 3.0, 3.0
"""Seconds of steps with evidence, and of a trial."""
MOST_NOISE = 0.05
"""With a larger difference between unchanged runs, losses are not compared one by one."""
MIN_STEPS, MAX_STEPS, FEW_STEPS = 12, 400, 3
"""Steps of a trial that are timed. Where they are long, they are fewer than MIN_STEPS."""
TRIAL_SHARE = 0.025
"""Share of the time that those fewer steps may take."""
WARM_STEPS = 4
"""First steps of a trial, which are not timed: a third of the others, and at most these."""
LEAST_GAIN = 1.01
"""A change is taken from this ratio on."""
PROMISING = 1.005
"""Lower gains of a first trial are not repeated."""
ROUNDS = 5
"""Most pairs of a change on top of those before it, and of the patched script."""
SCREEN_SHARE = 0.5
"""Share of the time after which no further change is measured first."""
LAST_TRIALS = 4
"""Trials of the patched script and the unchanged one for which the time is kept."""
MIN_FREEDOM = 2
"""Fewest degrees of freedom by which noise is known."""
SEEDS = 3
DIFFERENT = "its losses exceed the tolerance"
UNSEEN = "no loss was seen: no backward pass starts at a single number"
INSTEAD = {"compile-each-block": "compile"}
"""Changes that are only tried where a different one fails or is not tried."""
LATE = "the time was up before it was repeated"


@dataclass(frozen=True)
class Point:
    """What a trial runs: some changes, other arguments, or the patched files."""

    changes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """The command. () means as it was given."""
    is_patched: bool = False
    """Whether the files are patched."""
    seed_offset: int = 0


class TimeIsUp(Exception):
    """Ends the search: the time is over, or a signal came."""


@dataclass
class Search:
    """The search for changes that make a script faster, by trials in a copy of its directory."""

    command: Sequence[str]
    scratch: Scratch
    steps: int
    warm_steps: int
    """The first of them, which are not timed."""
    began_s: float
    """On the monotonic clock."""
    total_s: float
    longest_s: float
    """A trial is ended after this."""
    task: Task
    patch: Patch | None = None
    """The patch of points that are patched."""
    done: list[tuple[Point, Answer]] = field(default_factory=list)
    """With the `problem` of those that failed."""
    took_s: list[float] = field(default_factory=list)
    """What each of them took."""
    bases: list[Answer] = field(default_factory=list)
    """The unchanged script, between the first trials of changes."""
    noise: list[list[float]] = field(default_factory=list)
    """Ratios of pairs that were repeated, in groups."""
    rows: dict[str, ChangeRow] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Why changes were not measured."""
    taken: tuple[str, ...] = ()
    ended_by_signal: int | None = None

    def allows(self, trials: int, share: float = 1.0) -> bool:
        """Return whether this many trials of the usual length fit into a share of the time."""
        usual_s = statistics.fmean(self.took_s) if self.took_s else 0.0
        return time.monotonic() - self.began_s + trials * usual_s <= share * self.total_s

    def run(self, point: Point) -> Answer:
        """Run a trial. The answer has a `problem` if it failed, or took no step.

        Raises: TimeIsUp when it does not end within the time, or a signal came.
        """
        start_s = time.monotonic()
        left_s = self.began_s + self.total_s - start_s
        if left_s <= 0 or self.ended_by_signal is not None:
            raise TimeIsUp
        limit_s = min(self.longest_s, left_s)
        try:
            self.scratch.reset()
            if point.is_patched and self.patch is not None:
                apply(self.patch, self.scratch.path)
            answer, code, output, _ = run_command(
                [self.scratch.inside(word) for word in point.words or self.command],
                Request(
                    changes=point.changes,
                    timing=Timing(
                        steps=self.steps - self.warm_steps,
                        warmup_steps=self.warm_steps,
                        seed_offset=point.seed_offset,
                    ),
                    guarded=self.scratch.guarded,
                ),
                folder=self.scratch.path,
                is_captured=True,
                limit_s=limit_s,
            )
        except (KeyboardInterrupt, Interrupted) as interruption:
            self.ended_by_signal = signal_of(interruption)
            raise TimeIsUp from interruption
        problem = None
        if answer.failed:
            problem = next(iter(answer.failed.values()))
        elif len(answer.step_s) < self.steps and code:
            problem = last_words(self.scratch.original(output)) or f"exit code {code}"
        elif len(answer.step_s) <= self.warm_steps:
            problem = answer.problem or "it took too few steps"
            if code is None and limit_s < self.longest_s:
                raise TimeIsUp
            if code is None:
                problem = f"it took longer than {self.longest_s:.0f} s"
        answer = answer.model_copy(update={"problem": problem})
        self.done.append((point, answer))
        self.took_s.append(time.monotonic() - start_s)
        return answer

    def base(self) -> Answer:
        """Run a trial of the unchanged script.

        Raises: RunFailed when it fails; TimeIsUp.
        """
        answer = self.run(Point())
        if answer.problem:
            raise RunFailed(
                f"A trial of the unchanged script failed: {answer.problem}.",
                fix="Run it alone first, twice: trials have no standard input, and start in a copy "
                "of this directory.",
            )
        return answer

    def ratio(self, one: Answer, other: Answer) -> float:
        """Return how many times faster one trial was, over steps in which neither compiled."""
        steps = min(len(one.step_s), len(other.step_s))
        skipped = {*range(self.warm_steps), *one.compiled, *other.compiled}
        kept = [index for index in range(steps) if index not in skipped] or range(steps)
        return sum(other.step_s[i] for i in kept) / sum(one.step_s[i] for i in kept)

    def pairs(
        self, one: Point, other: Point, rounds: int, *, samples: int = 1, reserve: int = 0
    ) -> Figure | str:
        """Measure two points in turns, until it is decided how many times faster `one` is.

        Time for `reserve` trials is left. A step of `one` has `samples` times the samples. Returns
        the reason if a trial failed.
        """
        ratios: list[float] = []
        self.noise.append(ratios)
        try:
            for number in range(rounds):
                if number and not self.allows(2 + reserve):
                    break
                order = (one, other) if number % 2 else (other, one)
                answers = {point: self.run(point) for point in order}
                for answer in answers.values():
                    if answer.problem:
                        return answer.problem
                ratios.append(samples * self.ratio(answers[one], answers[other]))
                found = self.figure(ratios)
                if found.low is not None and not found.low <= LEAST_GAIN <= (found.high or 0.0):
                    break
        except TimeIsUp:
            if not ratios:
                return LATE
        return self.figure(ratios)

    def figure(self, ratios: Sequence[float]) -> Figure:
        """Return ratios with their interval, from the noise of all that was repeated here."""
        rates = spread([[self.ratio(one, self.bases[0]) for one in self.bases]])
        twice = Spread(math.sqrt(2) * rates.deviation, rates.freedom)  # a ratio is of two rates
        noise = pooled([spread(self.noise), twice])
        if len(ratios) < 2 or noise.freedom < MIN_FREEDOM:
            return Figure(median=statistics.median(ratios), low=None, high=None)
        low, median, high = interval_of(ratios, noise)
        return Figure(median=median, low=low, high=high)

    def losses(self, point: Point) -> list[list[float]]:
        """Return the losses of a point's trials."""
        return [answer.losses for each, answer in self.done if each == point and not answer.problem]

    def screen(self, names: Sequence[str]) -> None:
        """Measure every change once, two at a time between trials of the unchanged script.

        Raises: RunFailed when the unchanged script fails.
        """
        bases, done, waiting = self.bases, list[tuple[ChangeRow, Answer]](), [*names]
        try:
            bases.append(self.base())
            while waiting and self.goes_on():
                name = waiting[0]
                other = self.rows.get(INSTEAD.get(name, ""))
                if other is not None and not other.reason:
                    self.left[waiting.pop(0)] = f"{other.name} could be measured."
                    continue
                row = ChangeRow(name=name, does=CHANGES[name].does)
                self.task.note(f"{name}: {row.does}")
                answer = self.run(Point((name,)))
                self.rows[waiting.pop(0)] = row
                if answer.problem:
                    row.reason = f"failed: {answer.problem}"
                    continue
                done.append((row, answer))
                row.first_gain = self.ratio(answer, bases[-1])
                row.peak_gib, row.compile_s = answer.peak_gib, answer.compile_s
                if len(done) % 2 == 0 or not waiting:
                    bases.append(self.base())
        except TimeIsUp:
            pass
        why = NO_TIME if self.ended_by_signal is None else f"not measured: {INTERRUPTED}."
        self.left |= dict.fromkeys(waiting, why)
        for number, (row, answer) in enumerate(done):
            around = bases[number // 2 : number // 2 + 2]
            row.first_gain = statistics.fmean(self.ratio(answer, base) for base in around)

    def goes_on(self) -> bool:
        """Return whether there is time to measure a further change first.

        While none is promising, there is nothing else to keep time for.
        """
        has_promising = any((row.first_gain or 0.0) >= PROMISING for row in self.rows.values())
        return not self.rows or self.allows(1, SCREEN_SHARE if has_promising else 1.0)

    def add(self) -> None:
        """Add the winners one after the other, the largest gain first.

        The best one needs no race of its own while the patched script can still be measured.
        """
        gains = {name: row.first_gain or 0.0 for name, row in self.rows.items()}
        promising = sorted(
            (name for name, gain in gains.items() if gain >= PROMISING),
            key=lambda name: -gains[name],
        )
        for name in promising:
            row, point = self.rows[name], Point((*self.taken, name))
            if not self.allows(LAST_TRIALS + 4 * (len(promising) > 1)) and self.taken:
                row.reason = f"{UNPROVEN}: {LATE}"
                continue
            on_top = f" on top of {', '.join(self.taken)}" if self.taken else ""
            self.task.note(f"{name}{on_top}, again")
            try:
                for key, value in self.check(Point((name,)), CHANGES[name].rtol):
                    setattr(row, key, value)
            except TimeIsUp:
                row.reason = f"{UNPROVEN}: {LATE}"
                continue
            if row.within_tolerance is not True:
                row.reason = DIFFERENT if row.within_tolerance is False else UNSEEN
                continue
            if not self.taken and (promising[-1] == name or not self.allows(LAST_TRIALS + 4)):
                row.taken, self.taken = True, point.changes
                continue
            gain = self.pairs(point, Point(self.taken), ROUNDS, reserve=LAST_TRIALS)
            if isinstance(gain, str):
                row.reason = f"failed with the others: {gain}"
                continue
            row.gain, row.against = gain, list(self.taken)
            row.taken = (gain.low or 0.0) >= LEAST_GAIN
            if row.taken:
                self.taken = point.changes
            else:
                is_open = gain.median >= LEAST_GAIN and (gain.high or math.inf) > LEAST_GAIN
                row.reason = UNPROVEN if is_open else "no clear gain"
                row.reason += " on top" * bool(self.taken)

    def grow_batch(self, flag: str, accumulate_flag: str | None) -> None:
        """Measure larger batches, which are never part of the patch: they are arguments.

        With the argument for accumulation too, it is divided by as much, so that a step has the
        same samples. Without it, the gain is that of samples per second.
        """
        reason = "by samples per second: steps of other batches learn differently"
        if accumulate_flag is not None:
            reason = "an argument: not in the patch"
        for factor in (2, 4, 8, 16):
            value, words = scaled(self.command, flag, factor)
            steps, samples = 1.0, factor
            if accumulate_flag is not None:
                (steps, words), samples = scaled(words, accumulate_flag, 1 / factor), 1
            if steps % 1 or not self.allows(2):
                break
            row = ChangeRow(name=f"{flag} {value}", does="larger batches", against=list(self.taken))
            self.rows[row.name] = row
            self.task.note(row.name)
            point = Point(self.taken, tuple(words))
            gain = self.pairs(point, Point(self.taken), ROUNDS, samples=samples)
            if isinstance(gain, str):
                row.reason = f"failed: {gain}"
                break
            row.gain, row.reason = gain, reason
            if gain.median < factor**0.1:
                break

    def check(self, point: Point, rtol: float) -> LossCheck:
        """Return whether a point's losses differ by at most `rtol` from those without changes.

        They are compared step by step. Where they differ by more, for example because dropout draws
        other numbers, the mean of the last half decides: it must be within the spread of the
        unchanged script over several seeds. Without losses it is not known.

        Raises: TimeIsUp.
        """
        plain, changed = self.losses(Point()), self.losses(point)[0]
        if not changed or not plain[0]:
            return LossCheck(tolerance_reason=UNSEEN)
        apart, noise = difference(changed, plain[0]), noise_of(plain) or 0.0
        kind = "rounding" if rtol else "exact"
        is_kept = apart <= rtol + 2 * noise and noise <= MOST_NOISE
        reason = f"tolerance: {rtol:.0e}, {noise:.0e} between unchanged runs"
        if not is_kept and math.isfinite(apart):
            means: list[float] = []
            for number in range(SEEDS):
                seed = Point(seed_offset=1000 * number)
                if not self.losses(seed):
                    self.task.note("the losses with other seeds")
                    self.run(seed)
                means += map(end_of, self.losses(seed))
            low, high, mean = min(means), max(means), end_of(changed)
            kind, is_kept = "statistical", 2 * low - high <= mean <= 2 * high - low
            reason = f"the mean of the last losses is {mean:.4f}, and {low:.4f} to {high:.4f}"
            reason += f" over {SEEDS} seeds"
        return LossCheck(
            tolerance=kind,
            within_tolerance=is_kept,
            loss_difference=apart if math.isfinite(apart) else None,
            compared_losses=min(len(changed), len(plain[0]), LOSS_STEPS),
            tolerance_reason=reason,
        )

    def finish(self, sites: Sequence[Site], device: str) -> dict[str, Any]:
        """Measure the patched files, and what no patch can express, beside the unchanged script."""
        taken = self.taken
        if not taken:
            return {}
        edits = {name: edit_of(name, device) for name in taken}
        self.patch = made = patch_of(edits, sites, self.scratch.source)
        found: dict[str, Any] = {"patch": made.diff, "by_hand": made.by_hand}
        points = {"verified": Point(is_patched=True)} if made.diff else {}
        if made.by_hand:  # the patch is not all of it
            points = {"gain": Point(taken)} | points
        reasons: dict[str, str] = {}
        for key, point in points.items():
            self.task.note("all winners together" if key == "gain" else "the patched script")
            gain = self.pairs(point, Point(), ROUNDS)
            if isinstance(gain, str):
                reasons[key] = f"{UNPROVEN}: {gain}"
                continue
            found[key] = gain
            if (gain.low or 0.0) <= 1:
                is_slower = gain.high is not None and gain.high <= 1
                why = "it is not faster" if is_slower else f"its gain is {UNPROVEN}"
                reasons[key] = f"{why}, {figure_text(gain)}"
            try:
                found[f"{key}_losses"] = check = self.check(
                    point, sum(CHANGES[name].rtol for name in taken)
                )
            except TimeIsUp:
                reasons[key] = f"{UNPROVEN}: {LATE}"
                continue
            if check.within_tolerance is False:
                reasons[key] = DIFFERENT
        if not made.by_hand:
            found |= {"gain": found.get("verified"), "gain_losses": found.get("verified_losses")}
        if reasons:
            reason = next(iter(reasons.values()))
            found |= {"patch": "", "withheld": f"No patch is written: {reason}."}
            if next(iter(points)) in reasons:
                found |= {"by_hand": [], "gain": None, "gain_losses": None}
                self.taken = ()
                for name in taken:
                    self.rows[name].taken = False
                    self.rows[name].reason = f"in the end, {reason}"
        return found


def difference(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference between the first losses of two runs."""
    found = largest_difference(paired([(losses[:LOSS_STEPS], others[:LOSS_STEPS])]))
    are_finite = all(map(math.isfinite, (*losses[:LOSS_STEPS], *others[:LOSS_STEPS])))
    return math.inf if found is None or not are_finite else found


def end_of(losses: Sequence[float]) -> float:
    """Return the mean of the last half of losses."""
    return statistics.fmean(losses[len(losses) // 2 :])


def looked_at(
    command: Sequence[str], scratch: Scratch, limit_s: float
) -> tuple[Answer, Evidence, Facts]:
    """Return what the unchanged script shows, in its copy.

    Raises: RunFailed when it fails, or takes too few steps.
    """
    look, code, output, _ = run_command(
        [scratch.inside(word) for word in command],
        Request(seconds=LOOK_S, guarded=scratch.guarded),
        folder=scratch.path,
        is_captured=True,
        limit_s=limit_s,
    )
    look = Answer.model_validate_json(scratch.original(look.model_dump_json()))
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
    return look, evidence, facts


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
        scaled(command, flag, 1)
    out = writable(Path(out or f"tuned-{name_of(command)}"), patch)
    with Scratch(Path.cwd(), command) as scratch, progress.task("Tuning the script") as task:
        task.note("measuring the unchanged script")
        look, evidence, facts = looked_at(command, scratch, 60 * minutes)
        assert evidence.step_s is not None
        diagnosis = diagnosis_of(evidence)
        reasons = {name: change.why_not(facts, evidence) for name, change in CHANGES.items()}
        tried = [name for name, why in reasons.items() if (name in only if only else why is None)]
        timed = timed_steps(evidence.step_s, 60 * minutes)
        search = Search(
            command,
            scratch,
            steps=timed + min(WARM_STEPS, timed // 3),
            warm_steps=min(WARM_STEPS, timed // 3),
            began_s=began_s,
            total_s=60 * minutes,
            longest_s=4 * (time.monotonic() - began_s) + 180,
            task=task,
        )
        search.screen(tried)
        search.add()
        if flags[0] is not None:
            search.grow_batch(flags[0], flags[1])
        found = search.finish(look.sites, str(evidence.device).partition(":")[0])
        scratch.reset()
        ours = search.patch.files if search.patch else ()
        answers = [look, *(answer for _, answer in search.done)]
        result = ScriptTuning(
            command=list(command),
            machine=probe().describe(),
            verdict=diagnosis.verdict,
            step_ms=1e3 * evidence.step_s,
            steps=search.steps,
            num_trials=len(search.done),
            changes=list(search.rows.values()),
            not_tried=[
                Left(name=name, reason=why)
                for name, why in (reasons | search.left).items()
                if why and name not in search.rows
            ],
            taken=list(search.taken),
            loss_noise=noise_of(search.losses(Point())),
            written=[name for name in scratch.written if name not in ours],
            written_outside=[*dict.fromkeys(path for one in answers for path in one.writes)],
            path=str(out),
            wall_s=round(time.monotonic() - began_s, 1),
            ended_by_signal=search.ended_by_signal,
            **found,
        )
    write_results(out, result, search, diagnosis)
    if patch is not None:
        write_patch(Path(patch), result.patch, progress)
    return result


def writable(out: Path, patch: Path | str | None) -> Path:
    """Return the directory of the results, if it and the patch can be written.

    Raises: ConfigError when their directory is missing; OutputInUse when `out` is something else.
    """
    for path in (out, Path(patch or out)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"There is no directory {path.parent}.", fix="Create it, or name a different path."
            )
    if out.exists() and not (out / FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise OutputInUse(
            f"{out} exists and was not written by an earlier tune.", fix="Choose a different --out."
        )
    return out


def scaled(words: Sequence[str], flag: str, factor: float) -> tuple[float, list[str]]:
    """Multiply the number after an argument, as the next word or after `=`, and return both.

    Raises: ConfigError when there is none.
    """
    text = "\0".join(words)
    found = re.search(rf"(?<=\0){re.escape(flag)}[=\0]([1-9]\d*)(?=\0|$)", text)
    if found is None:
        raise ConfigError(
            f"The command has no {flag} with a number.",
            fix=f"Write its present value in the command, such as `{flag} 8`.",
        )
    value = int(found[1]) * factor
    start, end = found.span(1)
    return value, f"{text[:start]}{value:.0f}{text[end:]}".split("\0")


def timed_steps(step_s: float, total_s: float) -> int:
    """Return the steps of a trial that are timed: fewer where they are long."""
    few = max(FEW_STEPS, round(TRIAL_SHARE * total_s / step_s))
    return max(min(MIN_STEPS, few), min(round(TRIAL_S / step_s), MAX_STEPS))


def name_of(command: Sequence[str]) -> str:
    """Return the name of the script in a command."""
    scripts = [word for word in command if word.endswith(".py")] or command[-1:]
    return Path(scripts[0]).stem or "script"


def noise_of(runs: Sequence[list[float]]) -> float | None:
    """Return the largest relative difference of a loss between runs. None for a single one."""
    return max((difference(one, runs[0]) for one in runs[1:]), default=None)


def write_patch(path: Path, text: str, progress: Progress) -> None:
    """Write a patch, or remove that of an earlier tune if there is no edit to make."""
    if text:
        write_whole(path, text)
    else:
        path.unlink(missing_ok=True)
        progress.say(f"There is no edit to make, so {path} is not written.")


def write_results(out: Path, result: ScriptTuning, search: Search, diagnosis: Diagnosis) -> None:
    """Write tuning.json, changes.patch, and the losses and step times before and after."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, result.model_dump_json(indent=1) + "\n")
    (out / "changes.patch").unlink(missing_ok=True)
    if result.patch:
        write_text(out / "changes.patch", result.patch)
    for name, point in (("before", Point()), ("after", Point(tuple(result.taken)))):
        (out / name).mkdir(exist_ok=True)
        done = [answer for each, answer in search.done if each == point and not answer.problem]
        records = [
            {"step": step, "train/loss": loss, "perf/step_ms": 1e3 * step_s}
            for one in done[-1:]
            for step, (loss, step_s) in enumerate(zip(one.losses[1:], one.step_s, strict=False), 2)
        ]
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        write_text(out / name / "metrics.jsonl", text)
        changes = ({"event": "speedup", "name": n, "on": n in point.changes} for n in result.taken)
        text = "".join(f"{json.dumps(change)}\n" for change in changes)
        write_text(out / name / "events.jsonl", text)
    diagnosis.write(out / "before")
    write_text(out / "after" / SUMMARY, result.summary() + "\n")
