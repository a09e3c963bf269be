"""Turns trials into rows: gains with their intervals, and whether each promise was kept.

On a GPU, two runs of one command differ in their last bits, because attention and the embedding
accumulate gradients in no fixed order. If the losses of two sets of speedups differ there despite
an exact promise, both sets run once more, untimed, with train.deterministic=true, and those losses
decide. The alternative, comparing the difference with that between repeats, takes more runs and
cannot tell a small error from noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.assembly.recipe import Promise
from flatout.config.schema import RunConfig
from flatout.measure.trials.ladder import Ladder, Rung, promise_between
from flatout.measure.trials.results import TIME_WAS_UP, Row, Trial
from flatout.measure.trials.spec import TrialResult
from flatout.measure.trials.statistics import MIN_SEEDS, Spread, mean_of, median_of, spread

FINAL_LOSSES = 5
"""Number of last losses whose mean is taken as the final loss; a single one is too noisy."""

DETERMINISTIC_STEPS = 10
"""Losses to compare of deterministic runs: more than any speedup buffers, so that each of its
buffers is reused.
"""
Losses = Sequence[float]
LossPairs = Sequence[tuple[Losses, Losses]]
"""Losses (with, without) on the same batches, one pair per repeat."""


@dataclass(frozen=True)
class LossCheck:
    """Whether the losses of two points differ by no more than promised."""

    promise: Promise
    kept: bool | None
    """None: not decided."""
    reason: str
    """How it was decided, or why not."""
    pairs: LossPairs = ()
    """The losses that were compared."""
    deterministic: bool = False
    """Whether they are from runs with train.deterministic=true."""


@dataclass(frozen=True)
class Measured:
    """The trials of all points, by point and round."""

    trials: Sequence[Trial]
    stopped_by: str = TIME_WAS_UP
    """Why a point may have no trial."""
    repeats_to_the_bit: bool = True
    """Whether two runs of one command give equal losses on this device."""

    def named(self, points: Mapping[str, str]) -> Measured:
        """Return the trials under other names: `points` maps each to the point that it uses."""
        trials = [
            trial.model_copy(update={"point": name})
            for name, point in points.items()
            for trial in self.trials
            if trial.point == point
        ]
        return replace(self, trials=trials)

    def ok(self, point: str) -> dict[int, TrialResult]:
        """Return the point's timed results with figures, by round."""
        return {trial.round: trial.result for trial in self._timed(point) if trial.result.is_ok}

    def failed(self, point: str) -> TrialResult | None:
        """Return the point's first timed result without figures."""
        return next((trial.result for trial in self._timed(point) if not trial.result.is_ok), None)

    def deterministic(self, point: str) -> TrialResult | None:
        """Return the result of the point's run with train.deterministic=true, if there was one."""
        return next((t.result for t in self.trials if t.point == point and t.deterministic), None)

    def loss_pairs(self, one: str, other: str) -> list[tuple[list[float], list[float]]]:
        """Return the losses of two points on the same batches, one pair per common round."""
        return paired((a.losses, b.losses) for a, b in self._rounds(one, other))

    def needs_deterministic(self, promise: Promise, one: str, other: str) -> bool:
        """Return whether only deterministic runs can decide the promise about two points."""
        exact = promise.kind == "exact" and not self.repeats_to_the_bit
        return exact and differ(self.loss_pairs(one, other))

    def _rounds(self, *points: str) -> list[tuple[TrialResult, TrialResult]]:
        """Return the results of two points in each common round."""
        these, those = map(self.ok, points)
        return [(these[r], those[r]) for r in sorted(these.keys() & those.keys())]

    def _timed(self, point: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.point == point and not trial.deterministic]

    def rates(self, point: str) -> list[float]:
        """Return the point's tokens per second, one value per repeat."""
        return [result.tokens_per_s or 0.0 for result in self.ok(point).values()]

    def ratios(self, fast: str, slow: str) -> list[float]:
        """Return how many times faster `fast` was than `slow`, one value per common round."""
        pairs = self._rounds(fast, slow)
        return [(one.tokens_per_s or 0.0) / (other.tokens_per_s or 1.0) for one, other in pairs]


def repeats_to_the_bit(config: RunConfig) -> bool:
    """Return whether two runs of a resolved configuration give bit-equal losses.

    They do on a CPU, or with train.deterministic.
    """
    return config.train.device == "cpu" or config.train.deterministic


def paired(losses: Iterable[tuple[Losses, ...]]) -> list[tuple[list[float], list[float]]]:
    """Return pairs of losses cut to one length; a pair with an empty side is left out."""
    return [
        (list(one[: len(other)]), list(other[: len(one)])) for one, other in losses if one and other
    ]


def differ(pairs: LossPairs) -> bool:
    """Return whether any pair of losses is not bit-equal."""
    return any(list(one) != list(other) for one, other in pairs)


def missing(runs: Sequence[TrialResult | None]) -> str | None:
    """Return why the deterministic runs cannot decide a promise, None when they can."""
    failed = next((run for run in runs if run is not None and not run.is_ok), None)
    if failed is not None:
        return f"not checked: the run with train.deterministic=true gave no losses: {failed.reason}"
    if any(run is None or not run.losses for run in runs):
        return (
            "not checked: two runs of one command differ here, and there was no time for runs with "
            "train.deterministic=true"
        )
    return None


def measured_row(point: str, kind: str, found: Measured, shared: Spread) -> Row:
    """Return the row of one point, without comparisons."""
    results = list(found.ok(point).values())
    failed = found.failed(point)
    if not results:
        status, reason = (
            (failed.status, failed.reason)
            if failed
            else ("not-measured", f"not measured: {found.stopped_by} before its turn.")
        )
        return Row(name=point, kind=kind, status=status, reason=reason)
    peaks = [result.peak_gib for result in results if result.peak_gib is not None]
    return Row(
        name=point,
        kind=kind,
        reason=f"{failed.status} in one repeat: {failed.reason}" if failed else None,
        repeats=len(results),
        tokens_per_s=median_of(found.rates(point), shared=shared),
        peak_gib=max(peaks, default=None),
        rows_per_device=results[0].rows_per_device,
        accumulate=results[0].accumulate,
        warmup_steps=round(statistics.median(result.warmup_steps or 0 for result in results)),
        step_ms=_median([result.step_ms for result in results]),
        data_ms=_median([result.data_ms for result in results]),
        host_ms=_median([result.host_ms for result in results]),
        device_ms=_median([result.device_ms for result in results]),
    )


def _median(figures: Sequence[float | None]) -> float | None:
    """Return the median of the repeats that have the figure, None without any."""
    values = [value for value in figures if value is not None]
    return statistics.median(values) if values else None


def ladder_rows(
    ladder: Ladder,
    points: Mapping[str, str],
    found: Measured,
    config: RunConfig,
    *,
    loss_steps: int,
) -> list[Row]:
    """Return the rows of a ladder.

    `points` maps each rung to the point whose trials it uses; `loss_steps` is the number of losses
    that decide a promise.
    """
    rate_noise = spread(found.rates(point) for point in dict.fromkeys(points.values()))
    found = found.named(points)
    compared = {rung.name: measured_against(rung, ladder, found) for rung in ladder.rungs}
    ratios = {
        name: gains(ladder.rung(name), against, found)
        for name, against in compared.items()
        if against
    }
    gain_noise = spread(ratios.values())
    rows = []
    for rung in ladder.rungs:
        update: dict[str, object] = {
            "speedup": rung.speedup,
            "speedups": list(rung.speedups),
            "against": rung.against,
            "replaced": list(rung.replaced),
        }
        against = compared[rung.name]
        if against is not None and ratios[rung.name]:
            update |= _gain(rung, against, ratios[rung.name], gain_noise)
            update |= _loss_check(rung, against, found, config, loss_steps)
        elif rung.against and not found.ok(rung.against):
            name = "the full set" if rung.against == ladder.full else rung.against
            update["verdict"] = f"{name} gave no figures"
        row = measured_row(rung.name, rung.kind, found, rate_noise)
        rows.append(row.model_copy(update=update))
    return rows + [
        Row(
            name=absent.speedup,
            kind="absent",
            speedup=absent.speedup,
            status="not-measured",
            reason=absent.reason,
        )
        for absent in ladder.absent
    ]


def _gain(rung: Rung, against: Rung, ratios: Sequence[float], noise: Spread) -> dict[str, object]:
    """Return the fields of a row about its gain."""
    gain = median_of(ratios, shared=noise)
    verdict = gain.worth() if rung.kind == "left-out" else gain.verdict()
    if against.name != rung.against:
        verdict += f", together with the rungs without figures, against {against.name}"
    return {"against": against.name, "gain": gain, "verdict": verdict}


def measured_against(rung: Rung, ladder: Ladder, found: Measured) -> Rung | None:
    """Return the rung that `rung` is compared with.

    For an added speedup it is the nearest rung below that gave figures. An ablation of the full set
    can only be compared with the full set.
    """
    below = rung.against
    while below is not None:
        candidate = ladder.rung(below)
        if found.ok(below):
            return candidate
        below = candidate.against if rung.kind == "added" else None
    return None


def gains(rung: Rung, against: Rung, found: Measured) -> list[float]:
    """Return how many times faster the rung's speedup is, one value per round.

    For one that is left out, the comparison is the other way round.
    """
    pair = rung.name, against.name
    return found.ratios(*(reversed(pair) if rung.kind == "left-out" else pair))


def _loss_check(
    rung: Rung, against: Rung, found: Measured, config: RunConfig, loss_steps: int
) -> dict[str, object]:
    """Return the fields of a row about its losses."""
    promise, names = promise_between(rung.speedups, against.speedups), (rung.name, against.name)
    check = check_losses(promise, *names, found, config, loss_steps=loss_steps)
    fields: dict[str, object] = {
        "promise": promise.kind,
        "promise_kept": check.kept,
        "promise_reason": check.reason,
        "deterministic": check.deterministic,
    }
    if check.pairs:
        fields["loss_difference"] = largest_difference(check.pairs)
        fields["compared_losses"] = max(len(fast) for fast, _ in check.pairs)
    return fields


def check_losses(
    promise: Promise, one: str, other: str, found: Measured, config: RunConfig, *, loss_steps: int
) -> LossCheck:
    """Return whether the losses of two points keep a promise.

    Where runs differ in their last bits, an exact promise is decided by deterministic runs.
    """
    pairs = found.loss_pairs(one, other)
    if not pairs:
        return LossCheck(promise, None, "no losses to compare")
    deterministic = found.needs_deterministic(promise, one, other)
    if deterministic:
        runs = [found.deterministic(name) for name in (one, other)]
        if reason := missing(runs):
            return LossCheck(promise, None, reason, pairs)
        losses = tuple(run.losses if run else [] for run in runs)
        pairs, loss_steps = paired([losses]), DETERMINISTIC_STEPS
    dropout = float(config.model.own().get("dropout") or 0.0)
    kept, reason = keeps(promise, pairs, loss_steps=loss_steps, dropout=dropout)
    return LossCheck(promise, kept, reason, pairs, deterministic)


def keeps(
    promise: Promise, pairs: LossPairs, *, loss_steps: int, dropout: float = 0.0
) -> tuple[bool | None, str]:
    """Return whether losses keep a promise, and how that was decided.

    Exact and rounding must hold in every repeat. A statistical promise is kept unless the interval
    of the difference of the final losses, over at least three seeds, is above 0. None means
    undecided, for example when fewer than `loss_steps` losses show no violation.
    """
    steps = max(len(fast) for fast, _ in pairs)
    too_few = f"{steps} of {loss_steps} losses: not checked"
    if promise.kind == "statistical":
        return (None, too_few) if steps < loss_steps else _keeps_statistically(pairs)
    if promise.kind == "rounding" and dropout:
        return None, f"not checked: model.dropout={dropout:g} draws other random numbers"
    allowed = "bit-equal" if promise.kind == "exact" else f"within {promise.rtol:.0e}"
    kept = all(promise.holds(fast, plain) for fast, plain in pairs)
    if kept and steps < loss_steps:
        return None, too_few
    return kept, f"{steps} losses, {allowed} promised"


def _keeps_statistically(pairs: LossPairs) -> tuple[bool | None, str]:
    if len(pairs) < MIN_SEEDS:
        return None, f"too few seeds to check: {len(pairs)} of {MIN_SEEDS}"
    low, mean, high = mean_of(
        [
            statistics.fmean(fast[-FINAL_LOSSES:]) - statistics.fmean(plain[-FINAL_LOSSES:])
            for fast, plain in pairs
        ]
    )
    return low <= 0, f"final loss {mean:+.4f} ({low:+.4f} to {high:+.4f}) over {len(pairs)} seeds"


def largest_difference(pairs: LossPairs) -> float:
    """Return the largest relative difference of a loss."""
    return max(
        abs(a - b) / abs(b) if b else abs(a - b)
        for fast, plain in pairs
        for a, b in zip(fast, plain, strict=True)
    )
