"""The trials of an experiment: results, gains within rounds, and whether losses are in tolerance.

On a GPU, two runs of one command differ in their last bits, because attention and the embedding
accumulate gradients in no fixed order. If the losses of two points differ there despite an exact
tolerance, both run once more, untimed, with train.deterministic=true, and those losses decide. The
alternative, comparing the difference with that between repeats, takes more runs and cannot tell a
small error from noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flatout.assembly.recipe import Tolerance
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.measure.experiments.noise import MIN_SEEDS, Spread, mean_of, median_of, spread
from flatout.measure.experiments.records import (
    TIME_WAS_UP,
    Figure,
    LossCheck,
    Row,
    Steps,
    Trial,
    TrialResult,
)

LOSS_STEPS = 20
"""Number of first losses that are compared."""
DETERMINISTIC_STEPS = 10
"""Losses to compare of deterministic runs: more than any speedup buffers, so that each of its
buffers is reused.
"""
FINAL_LOSSES = 5
"""Number of last losses whose mean is taken as the final loss. A single one is too noisy."""
STRICTNESS = ("exact", "rounding", "statistical")
LossPairs = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Losses (with, without) on the same batches, one pair per repeat."""


@dataclass
class Trials:
    """The trials of all points, which are compared within rounds."""

    done: list[Trial] = field(default_factory=list)
    repeats_to_the_bit: bool = True
    """Whether two runs of one command give equal losses on this device."""
    dropout: float = 0.0
    """model.dropout. Where it is on, losses cannot be compared up to rounding."""
    loss_steps: int = LOSS_STEPS
    """Number of losses that decide a loss check."""
    stopped_by: str = TIME_WAS_UP
    """Why a point may have no trial."""

    @classmethod
    def of(cls, resolved: RunConfig) -> Trials:
        """Return the trials, none yet, of a resolved configuration.

        Two runs are bit-identical on a CPU, or with train.deterministic.
        """
        dropout = float(resolved.model.own().get("dropout") or 0.0)
        is_exact = resolved.train.device == "cpu" or resolved.train.deterministic
        return cls([], is_exact, dropout)

    def over(self, tokens: int) -> Trials:
        """Return the trials with the rates of a run of `tokens`, its compilation included."""
        trials = []
        for trial in self.done:
            rate, compile_s = trial.result.tokens_per_s, trial.result.compile_s
            if rate and compile_s:
                rate = tokens / (tokens / rate + compile_s)
                result = trial.result.model_copy(update={"tokens_per_s": rate})
                trial = trial.model_copy(update={"result": result})
            trials.append(trial)
        return replace(self, done=trials)

    def timed(self, point: str) -> list[Trial]:
        """Return the timed trials of a point."""
        return [trial for trial in self.done if trial.point == point and not trial.deterministic]

    def ok(self, point: str) -> dict[int, TrialResult]:
        """Return the point's successful timed results, by round."""
        return {trial.round: trial.result for trial in self.timed(point) if trial.result.is_ok}

    def deterministic(self, point: str) -> TrialResult | None:
        """Return the result of the point's run with train.deterministic=true, if there was one."""
        return next((t.result for t in self.done if t.point == point and t.deterministic), None)

    def pairs(self, one: str, other: str) -> list[tuple[TrialResult, TrialResult]]:
        """Return the results of two points in each common round."""
        these, those = self.ok(one), self.ok(other)
        return [(these[number], those[number]) for number in sorted(these.keys() & those.keys())]

    def rates(self, point: str) -> list[float]:
        """Return the point's tokens per second, one value per repeat."""
        return [result.tokens_per_s or 0.0 for result in self.ok(point).values()]

    def ratios(self, fast: str, slow: str) -> list[float]:
        """Return how many times faster `fast` was than `slow`, one value per common round."""
        pairs = self.pairs(fast, slow)
        return [(one.tokens_per_s or 0.0) / (other.tokens_per_s or 1.0) for one, other in pairs]

    def noise(self) -> Spread:
        """Return the noise of a ratio: of all points to the first one that has results."""
        points = dict.fromkeys(trial.point for trial in self.done if self.ok(trial.point))
        base, *others = points or [""]
        return spread(self.ratios(point, base) for point in others)

    def gain(self, one: str, other: str) -> Figure | None:
        """Return how many times faster `one` is than `other`. None when no round has both."""
        ratios = self.ratios(one, other)
        return median_of(ratios, shared=self.noise()) if ratios else None

    def loss_pairs(self, one: str, other: str) -> LossPairs:
        """Return the losses of two points on the same batches, one pair per common round."""
        return paired((a.losses, b.losses) for a, b in self.pairs(one, other))

    def needs_deterministic(self, tolerance: Tolerance, one: str, other: str) -> bool:
        """Return whether only deterministic runs can compare the losses of two points."""
        exact = tolerance.kind == "exact" and not self.repeats_to_the_bit
        return exact and any(fast != plain for fast, plain in self.loss_pairs(one, other))

    def check(self, tolerance: Tolerance, one: str, other: str) -> LossCheck:
        """Return whether the losses of two points stay within a tolerance."""
        pairs, loss_steps = self.loss_pairs(one, other), self.loss_steps
        why_not = "" if pairs else "no losses to compare"
        apart = self.needs_deterministic(tolerance, one, other)
        if apart:
            runs = [run for name in (one, other) if (run := self.deterministic(name))]
            failed = [str(run.reason) for run in runs if not run.is_ok]
            if failed:
                why_not = "not checked: the run with train.deterministic=true gave no losses: "
                why_not += failed[0]
            elif len(runs) < 2 or not all(run.losses for run in runs):
                why_not = "not checked: two runs of one command differ here, and there was no time "
                why_not += "for runs with train.deterministic=true"
            else:
                pairs, loss_steps = paired([(runs[0].losses, runs[1].losses)]), DETERMINISTIC_STEPS
        kept, reason = None, why_not
        if not why_not:
            kept, reason = is_within(tolerance, pairs, loss_steps=loss_steps, dropout=self.dropout)
        return LossCheck(
            tolerance=tolerance.kind,
            within_tolerance=kept,
            tolerance_reason=reason,
            deterministic=apart and not why_not,
            loss_difference=largest_difference(pairs),
            compared_losses=max((len(fast) for fast, _ in pairs), default=None),
        )

    def measured(self, row: Row, point: str) -> Row:
        """Return a row with the results of a point, or the reason why there are none."""
        results, rates = list(self.ok(point).values()), self.rates(point)
        failed = next((t.result for t in self.timed(point) if not t.result.is_ok), None)
        if not results:
            status, reason = "not-measured", f"not measured: {self.stopped_by} before its turn."
            if failed:
                status, reason = failed.status, str(failed.reason)
            return row.model_copy(update={"status": status, "reason": reason})
        known = {
            name: [value for result in results if (value := getattr(result, name)) is not None]
            for name in Steps.model_fields
        }
        figures = {name: statistics.median(values) for name, values in known.items() if values}
        facts = {
            "reason": f"{failed.status} in one repeat: {failed.reason}" if failed else None,
            "repeats": len(results),
            "tokens_per_s": median_of(
                rates, shared=spread(self.rates(name) for name in {t.point for t in self.done})
            ),
            "peak_gib": max(known["peak_gib"], default=None),
            "rows_per_device": results[0].rows_per_device,
            "accumulate": results[0].accumulate,
            "warmup_steps": round(figures.get("warmup_steps", 0)),
        }
        return row.model_copy(update=figures | facts)


def paired(losses: Iterable[tuple[list[float], list[float]]]) -> LossPairs:
    """Return pairs of losses cut to one length. A pair with an empty side is omitted."""
    return [(one[: len(other)], other[: len(one)]) for one, other in losses if one and other]


def tolerance_between(one: Iterable[str], other: Iterable[str]) -> Tolerance:
    """Return the tolerance between the losses of two sets: the loosest of the unshared speedups.

    Rounding tolerances add up, and include the largest one of the shared speedups: a difference in
    the last bit of fp32 flips some later roundings to bfloat16, and the losses differ by those.
    """
    shared, unshared = set(one) & set(other), set(one) ^ set(other)
    tolerances = [SPEEDUPS.get(name).tolerance for name in unshared]
    loosest = max(tolerances, key=lambda p: STRICTNESS.index(p.kind), default=Tolerance.exact())
    kind = loosest.kind
    amplified = (SPEEDUPS.get(name).tolerance.rtol for name in shared if kind == "rounding")
    return Tolerance(
        kind, sum(tolerance.rtol for tolerance in tolerances) + max(amplified, default=0.0)
    )


def is_within(
    tolerance: Tolerance, pairs: LossPairs, *, loss_steps: int, dropout: float = 0.0
) -> tuple[bool | None, str]:
    """Return whether losses stay within a tolerance, and how that was decided.

    Exact and rounding must hold in every repeat. A statistical tolerance holds unless the interval
    of the difference of the final losses, over at least three seeds, is above 0. None means
    undecided, for example when fewer than `loss_steps` losses show no violation.
    """
    steps = max(len(fast) for fast, _ in pairs)
    too_few = f"{steps} of {loss_steps} losses: not checked"
    if tolerance.kind == "statistical":
        if steps < loss_steps:
            return None, too_few
        if len(pairs) < MIN_SEEDS:
            return None, f"too few seeds to check: {len(pairs)} of {MIN_SEEDS}"
        final = [[statistics.fmean(losses[-FINAL_LOSSES:]) for losses in pair] for pair in pairs]
        low, mean, high = mean_of([fast - plain for fast, plain in final])
        seeds = f"({low:+.4f} to {high:+.4f}) over {len(pairs)} seeds"
        return low <= 0, f"final loss {mean:+.4f} {seeds}"
    if tolerance.kind == "rounding" and dropout:
        return None, f"not checked: model.dropout={dropout:g} draws different random numbers"
    allowed = "bit-equal" if tolerance.kind == "exact" else f"{tolerance.rtol:.0e}"
    kept = all(tolerance.holds(fast, plain) for fast, plain in pairs)
    if kept and steps < loss_steps:
        return None, too_few
    return kept, f"{steps} losses, tolerance: {allowed}"


def largest_difference(pairs: LossPairs) -> float | None:
    """Return the largest relative difference of a loss. None without losses."""
    return max(
        (
            abs(a - b) / abs(b) if b else abs(a - b)
            for fast, plain in pairs
            for a, b in zip(fast, plain, strict=True)
        ),
        default=None,
    )
