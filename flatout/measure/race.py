"""A race: trials of several settings in turns, their ratios with intervals, their losses compared.

A round runs each of its settings once, with one seed, close in time: only what was measured in one
round is compared, since the load of a machine changes over minutes. Rates are positive and their
noise is multiplicative, so its spread is that of logarithms, measured on everything that was
repeated. The screening that orders candidates is round 0, which no ratio contains. No torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from flatout.display import Show, milliseconds
from flatout.errors import Interrupted, RunFailed, signal_of
from flatout.measure.intervals import (
    LEAST_GAIN,
    ROUNDS,
    Figure,
    figure_of,
    mean_of,
    spread,
)
from flatout.measure.trial import Result
from flatout.progress import Progress, counted
from flatout.storage.files import Stored

if TYPE_CHECKING:
    from flatout.assembly.speedup import Tolerance

LOSS_STEPS = 20
"""First losses that are compared."""
SCREEN = 0
"""The round of the screening."""
MIN_SEEDS = 3
"""Fewest rounds over which final losses are compared."""
MOST_NOISE = 0.05
"""A larger difference between two runs of one setting is no rounding: their losses are wrong."""
MEDIANS = ("step_ms", "compile_s", "peak_gib", "rows_per_device", "accumulate")
"""Fields of a row that are medians of its trials."""
Setting = Hashable
"""What a trial is of: anything that can be told apart."""
LossPairs = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Losses (with, without) on the same batches, one pair per round."""


class TimeIsUp(Exception):
    """Ends a race: the time is over, or a signal came."""


class LossCheck(Stored):
    """Whether the losses of two settings stay within the tolerance."""

    tolerance: str | None = None
    """exact, rounding or statistical. Null if the losses were not compared."""
    within_tolerance: bool | None = None
    """null if it was not decided."""
    tolerance_reason: str | None = None
    """How it was decided, or why not."""
    loss_difference: float | None = None
    """Largest relative difference of a loss, on the same batches."""
    compared_losses: int | None = None
    """Number of first steps whose losses were compared."""

    def words(self) -> str:
        """Return how far the losses are apart, and why if that is not within the tolerance."""
        reason = "" if self.within_tolerance else f": {self.tolerance_reason}"
        return f"{self.apart()}{reason}" if self.tolerance_reason else ""

    def apart(self) -> str:
        """Return how far the losses are apart, in short."""
        if self.tolerance_reason is None:
            return ""
        text = "not comparable"
        if self.loss_difference is not None:
            text = f"{self.loss_difference:.0e} apart" if self.loss_difference else "equal"
        return text + ", OUT OF TOLERANCE" * (self.within_tolerance is False)


class Row(LossCheck):
    """What was measured about a setting, or why it was not."""

    model_config = ConfigDict(frozen=False)

    taken: Annotated[bool, Show("", lambda taken: "+" * taken)] = False
    """Whether it is one of the winners."""
    name: Annotated[str, Show()]
    """Name of the change, or of the setting."""
    kind: str = "change"
    """baseline, added, leave-one-out or add-one (of a bench); point (of a sweep); change or best
    (of tune); absent (not measured)."""
    does: str = ""
    """What a change does, in a few words."""
    speedup: str | None = None
    """The speedup that it measures."""
    speedups: list[str] = Field([])
    """All speedups that were on."""
    leaves_out: bool = False
    """Whether a change removes the speedup. `gain` is that of removing it."""
    against: str | None = None
    """What it is compared with."""
    status: str = "ok"
    """ok, out-of-memory, failed, timed-out or not-measured."""
    tokens_per_s: Annotated[
        Figure | None,
        Show("tokens/s", lambda rate: f"{rate.median:,.0f}", unknown="", align="right"),
    ] = None
    """Tokens per second of measured steps."""
    gain: Annotated[Figure | None, Show("gain", record=lambda row: row.gain_cell())] = None
    """How many times faster, from paired repeats. For a row of a bench that leaves a speedup out,
    how many times faster with it."""
    first_gain: float | None = None
    """The ratio of its first trial to the one beside it, which only orders changes."""
    screened: Figure | None = None
    """How many times faster it is in blocks of steps of one process. Only of a script."""
    losses: Annotated[
        None,
        Show("losses", record=LossCheck.apart),
    ] = Field(None, exclude=True)
    step_ms: Annotated[float | None, Show("step", record=lambda row: row.step_cell())] = None
    """Mean time of a measured step, the median over its trials."""
    rows_per_device: Annotated[
        int | None,
        Show("rows", record=lambda r: f"{r.rows_per_device}x{r.accumulate}" * bool(r.accumulate)),
    ] = None
    """Sequences in a micro-batch."""
    accumulate: int | None = None
    """Micro-batches per step."""
    peak_gib: Annotated[float | None, Show("GiB", ".2f", unknown="")] = None
    """Peak memory: of the device, or on a CPU of the process."""
    compile_s: Annotated[
        float | None,
        Show("compiles", record=lambda row: row.compile_cell()),
    ] = None
    """Seconds spent compiling, once per start. Null when nothing was compiled."""
    pays_after: int | None = None
    """Steps after which the time to compile is made up for."""
    repeats: int = 0
    """Trials with results."""
    reason: Annotated[str | None, Show("", unknown="")] = None
    """Why it is not ok, or why it was not taken."""

    def step_cell(self) -> str:
        """Return the time of a step for a table that has no rate."""
        is_shown = self.step_ms is not None and self.tokens_per_s is None
        return milliseconds((self.step_ms or 0.0) / 1e3) if is_shown else ""

    def compile_cell(self) -> str:
        """Return the time to compile for a table, and when it pays."""
        pays = f", pays after {self.pays_after:,} steps" if self.pays_after else ""
        return f"{self.compile_s:.0f} s{pays}" if self.compile_s else ""

    def gain_cell(self) -> str:
        """Return the gain for a table, or why there is none."""
        if self.gain is not None:
            return self.gain.gain().replace(" to ", "-").partition(":")[0]
        if self.screened is not None:
            on_top = f" on top of {self.against}" if self.against else ""
            return f"{self.screened.gain()} within one run{on_top}"
        if self.first_gain is not None:
            return f"x{self.first_gain:.2f} in one trial"
        return "" if self.repeats else self.status


def absent_row(name: str, why: str | None) -> Row:
    """Return the row of something that is not measured."""
    return Row(name=name, kind="absent", speedup=name, status="not-measured", reason=why)


@dataclass(frozen=True)
class Done:
    """A trial that has ended."""

    setting: Any
    round: int
    seed: int
    result: Result


@dataclass
class Race:
    """Runs trials of settings, and compares them."""

    start: Callable[[Any, int, float], Result]
    """Runs a trial of a setting with a seed, at most for some seconds."""
    tolerance: Callable[[Any, Any], Tolerance]
    """Returns how far the losses of two settings may differ."""
    total_s: float = math.inf
    """The time for all trials."""
    longest_s: float = math.inf
    """A trial is ended after this."""
    ratio: Callable[[Result, Result], float] = Result.times_as_fast
    """How many times faster the first one is."""
    loss_steps: int = LOSS_STEPS
    """Fewest losses that must be compared."""
    draws: str | None = None
    """Why losses cannot be compared step by step, such as dropout."""
    is_strict: bool = True
    """Whether losses that differ step by step are wrong. If not, final losses decide."""
    name: Callable[[Any], str] = lambda setting: ""
    """Returns the name of a setting."""
    note: Callable[[str], object] = lambda text: None
    """Shows what is measured."""
    began_s: float = field(default_factory=lambda: time.monotonic())
    """The start, by time.monotonic."""
    began: str = field(
        default_factory=lambda: datetime.now().astimezone().isoformat("T", "seconds")
    )
    """Its date and time."""
    done: list[Done] = field(default_factory=list)
    round: int = SCREEN
    """The last round."""
    ended_by_signal: int | None = None
    """The signal that interrupted it, if any. No further trial starts."""

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.total_s - self.spent_s

    @property
    def stopped_by(self) -> str:
        """Why a setting may have no trial."""
        return "the time was up" if self.ended_by_signal is None else "it was interrupted"

    def allows(self, *settings: Setting, share: float = 1.0) -> bool:
        """Return whether trials of these settings fit into what is left of a share of the time."""
        rest_s = 0.0 if math.isinf(self.total_s) else (1 - share) * self.total_s
        return self.left_s - rest_s >= sum(map(self.expected_s, settings))

    def expected_s(self, setting: Setting) -> float:
        """Return the seconds that a trial takes, by its last one, or else by all. 0 before any."""
        own = [one.result.process_s for one in self.done if one.setting == setting]
        every = [one.result.process_s for one in self.done]
        return own[-1] if own else statistics.fmean(every or [0.0])

    @contextmanager
    def running(self, progress: Progress, title: str) -> Iterator[None]:
        """Show the trials inside the block as an operation, which a signal or the time ends."""
        try:
            with progress.task(title) as task:
                self.note = task.note
                yield
        except TimeIsUp:
            pass
        except (KeyboardInterrupt, Interrupted) as interruption:
            self.ended_by_signal = signal_of(interruption)

    def run(self, setting: Setting, number: int = SCREEN, seed: int = 0) -> Result:
        """Run a trial in a round with a seed, and return the result.

        Raises: TimeIsUp when it does not end within the time, or a signal came.
        """
        limit_s = min(self.longest_s, self.left_s)
        self.note(self.name(setting) + f", round {number}" * (number != SCREEN))
        if limit_s <= 0 or self.ended_by_signal is not None:
            raise TimeIsUp
        try:
            result = self.start(setting, seed, limit_s)
        except (KeyboardInterrupt, Interrupted) as interruption:
            self.ended_by_signal = signal_of(interruption)
            raise TimeIsUp from interruption
        if result.status == "timed-out" and limit_s < self.longest_s and self.done:
            raise TimeIsUp
        self.done.append(Done(setting, number, seed, result))
        return result

    def results(self, setting: Setting) -> list[Result]:
        """Return the successful results of a setting, the screening included."""
        return [one.result for one in self.done if one.setting == setting and one.result.is_ok]

    def failure(self, setting: Setting) -> Result | None:
        """Return the first result of a setting that failed."""
        results = (one.result for one in self.done if one.setting == setting)
        return next((result for result in results if not result.is_ok), None)

    def ratios(self, fast: Setting, slow: Setting) -> list[float]:
        """Return how many times faster `fast` was than `slow`, one value per common round."""
        ours, theirs = (
            {one.round: one.result for one in self.done
             if one.setting == setting and one.round != SCREEN and one.result.is_ok}
            for setting in (fast, slow)
        )  # fmt: skip
        return [self.ratio(ours[at], theirs[at]) for at in sorted(ours.keys() & theirs.keys())]

    def noise(self) -> tuple[float, int]:
        """Return the noise of a ratio, from all that was repeated: ratios, and screened rates."""
        settings = [*dict.fromkeys(one.setting for one in self.done)]
        # of each setting, with an earlier one: no pair follows from other pairs
        groups = [
            max((self.ratios(one, other) for other in settings[:number]), key=len)
            for number, one in enumerate(settings[1:], 1)
        ]
        screened = [
            one.result.step_ms ** math.sqrt(2)  # a ratio is of two rates
            for one in self.done
            if one.setting == settings[0] and one.result.is_ok and one.round == SCREEN
        ]
        return spread([*groups, screened])

    def gain(self, fast: Setting, slow: Setting) -> Figure | None:
        """Return how many times faster one setting is. None when no round has both."""
        ratios = self.ratios(fast, slow)
        return figure_of(ratios, self.noise()) if ratios else None

    def rounds(
        self,
        settings: Sequence[Setting],
        repeats: int = ROUNDS,
        *,
        reserve: int = 0,
        is_decided: Callable[[], bool] = lambda: False,
    ) -> None:
        """Measure settings in turns, close in time, until it is decided or the time is up.

        Every other round runs backwards, so that a machine that slows down favours none. What fails
        is not tried again. When there is no time for a whole round, the last ones have none. Time
        is left for `reserve` further trials of each.

        Raises: TimeIsUp.
        """
        start = len(self.done)
        for number in range(repeats):
            failed = {one.setting for one in self.done[start:] if not one.result.is_ok}
            due = [one for one in settings if one not in failed]
            while number and due and not self.allows(*(1 + reserve) * due):
                due.pop()
            if number and len(due) < 2:
                return
            self.round += 1
            for one in due[:: (-1) ** number]:
                self.run(one, self.round, number)
            if is_decided():
                return

    def compare(
        self,
        one: Setting,
        other: Setting,
        *,
        rounds: int = ROUNDS,
        least: float = LEAST_GAIN,
        reserve: int = 0,
    ) -> str | None:
        """Measure two settings in turns, until it is decided whether `one` gains `least`, and
        whether their final losses agree if those decide.

        Returns why there is no gain: a trial failed, or not even one round was complete.
        """

        def is_decided() -> bool:
            gain, check = self.gain(one, other), self.check(one, other)
            if gain is None or gain.low is None or gain.high is None:
                return False
            is_open = check.within_tolerance is None and check.tolerance == "statistical"
            return not (gain.low <= least <= gain.high or is_open)

        start = len(self.done)
        with suppress(TimeIsUp):
            self.rounds((other, one), rounds, reserve=reserve, is_decided=is_decided)
        for done in self.done[start:]:
            if not done.result.is_ok:
                return f"failed: {done.result.reason}"
        return None if self.ratios(one, other) else f"{self.stopped_by} before it was repeated"

    def losses(self, setting: Setting) -> dict[int, list[list[float]]]:
        """Return the first losses of each trial of a setting, by its seed."""
        found: dict[int, list[list[float]]] = {}
        for one in self.done:
            if one.setting == setting and one.result.losses:
                found.setdefault(one.seed, []).append(one.result.losses[:LOSS_STEPS])
        return found

    def check(self, one: Setting, other: Setting) -> LossCheck:
        """Return whether the losses of two settings stay within their tolerance.

        Exact and rounding hold step by step in the last trials of each seed, up to twice the
        difference between two runs of `other` with one seed. A statistical tolerance compares final
        losses, the means of the last halves of the first LOSS_STEPS, over three seeds: the interval
        of their difference must not be above 0, nor their mean outside of the spread of `other`.
        """
        tolerance = self.tolerance(one, other)
        ours, theirs, kind = self.losses(one), self.losses(other), tolerance.kind
        last = [(ours[seed][-1], theirs[seed][-1]) for seed in ours if seed in theirs]
        pairs = [(fast[: len(plain)], plain[: len(fast)]) for fast, plain in last]
        if not pairs:
            return LossCheck(tolerance=kind, tolerance_reason="no losses to compare")
        apart, steps = difference(pairs), min(len(fast) for fast, _ in pairs)
        again = (difference([pair]) for runs in theirs.values() for pair in pairwise(runs))
        noise = max(filter(None, again), default=0.0)  # of consecutive runs with one seed
        kept: bool | None = None
        reason = f"not checked: {self.draws}"
        if kind != "statistical" and self.draws is None:
            kept = apart is not None and apart <= tolerance.rtol + 2 * noise and noise <= MOST_NOISE
            allowed = "bit-equal" if kind == "exact" else f"{tolerance.rtol:.0e}"
            reason = f"{steps} losses, tolerance: {allowed}"
            reason += f", {noise:.0e} between unchanged runs" * (noise > 0)
            if kept and steps < self.loss_steps:
                kept, reason = None, f"{steps} of {self.loss_steps} losses: not checked"
        if kind == "statistical" or (not self.is_strict and kept is not True and apart is not None):
            kind, (kept, reason) = "statistical", final_losses(pairs)
        return LossCheck(
            tolerance=kind,
            within_tolerance=kept,
            tolerance_reason=reason,
            loss_difference=apart,
            compared_losses=steps,
        )

    def row(self, setting: Setting, other: Setting | None = None, /, **known: Any) -> Row:
        """Return what was measured of a setting, and its gain over another one."""
        results, failed = self.results(setting), self.failure(setting)
        late = f"not measured: {self.stopped_by} before its turn."
        facts: dict[str, Any] = {"repeats": len(results), "status": "not-measured", "reason": late}
        if failed:
            facts |= {"status": failed.status, "reason": failed.reason}
        if not results:
            return Row(**facts | known)
        facts |= {"status": "ok", "reason": None}
        if failed:
            facts["reason"] = f"{failed.status} in one repeat: {failed.reason}"
        if other is not None and self.results(other):
            facts |= {"gain": self.gain(setting, other), **dict(self.check(setting, other))}
        rates = {
            each: [rate for one in self.results(each) if (rate := one.tokens_per_s)]
            for each in dict.fromkeys(one.setting for one in self.done)
        }
        if rates[setting]:
            facts["tokens_per_s"] = figure_of(rates[setting], spread([*rates.values()]))
        for name in MEDIANS:
            values = [value for one in results if (value := getattr(one, name)) is not None]
            facts[name] = statistics.median(values) if values else None
        return Row(**facts | {key: value for key, value in known.items() if value is not None})

    def require_result(self, fix: str = "Run it alone first.") -> None:
        """Check that some trial has a result.

        Raises: Interrupted after a signal; otherwise RunFailed.
        """
        if any(one.result.is_ok for one in self.done):
            return
        if self.ended_by_signal is not None:
            what = "Interrupted before any trial had a result."
            raise Interrupted(what, fix="Run it again.", signal_number=self.ended_by_signal)
        late, why = "Give it more --minutes.", f"{self.stopped_by} before a trial had ended"
        if self.done:
            first = self.done[0].result
            why = f"{counted(len(self.done), 'trial')} failed. The first one: {first.reason}"
            fix = late if first.status == "timed-out" else fix
        raise RunFailed(f"Nothing was measured: {why}.", fix=fix if self.done else late)


def difference(pairs: LossPairs) -> float | None:
    """Return the largest relative difference of a loss. None without losses, or if one is not
    finite.
    """
    apart = [
        abs(a - b) / abs(b) if b else abs(a - b)
        for fast, plain in pairs
        for a, b in zip(fast, plain, strict=False)
    ]
    return max(apart) if apart and all(map(math.isfinite, apart)) else None


def final_losses(pairs: LossPairs) -> tuple[bool | None, str]:
    """Return whether final losses are as good over seeds, and how that was decided."""
    if len(pairs) < MIN_SEEDS:
        return None, f"too few seeds to check: {len(pairs)} of {MIN_SEEDS}"
    ours, theirs = ([statistics.fmean(each[len(each) // 2 :]) for each in side]
                    for side in zip(*pairs, strict=True))  # fmt: skip
    low, mean, high = mean_of([fast - plain for fast, plain in zip(ours, theirs, strict=True)])
    least, most = min(theirs), max(theirs)
    is_near = statistics.fmean(ours) <= 2 * most - least
    seeds = f"({low:+.4f} to {high:+.4f}) over {len(pairs)} seeds"
    return low <= 0 and is_near, f"final loss {mean:+.4f} {seeds}"
