"""From trials to verdicts: gains with their intervals, and whether each promise was kept."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.assembly.recipe import Promise
from flatout.config.schema import RunConfig
from flatout.measure import exactness
from flatout.measure.ladder import Ladder, Rung, promise_between
from flatout.measure.results import TIME_WAS_UP, Row, Trial
from flatout.measure.spec import TrialResult
from flatout.measure.statistics import FEWEST_SEEDS, Spread, mean_of, median_of, spread

FINAL_LOSSES = 5
"""Last losses whose mean stands for the final loss: one alone is noisier than the difference that
is looked for.
"""


@dataclass(frozen=True)
class Measured:
    """The trials of all points, by point and round."""

    trials: Sequence[Trial]
    stopped_by: str = TIME_WAS_UP
    """What kept a point without a trial from its turn."""
    repeats_to_the_bit: bool = True
    """Whether two runs of one command give equal losses on this device."""

    def ok(self, point: str) -> dict[int, TrialResult]:
        """Return the point's timed results that gave figures, by round."""
        return {trial.round: trial.result for trial in self._timed(point) if trial.result.is_ok}

    def failed(self, point: str) -> TrialResult | None:
        """Return the point's first timed result that gave none."""
        return next((trial.result for trial in self._timed(point) if not trial.result.is_ok), None)

    def deterministic(self, point: str) -> TrialResult | None:
        """Return the result of the point's run with train.deterministic=true; None when there was
        none.
        """
        return next(
            (trial.result for trial in self.trials if trial.point == point and trial.deterministic),
            None,
        )

    def loss_pairs(self, one: str, other: str) -> list[tuple[list[float], list[float]]]:
        """Return the losses of two points on the same batches, cut to one length, a pair each round
        in which both have some.
        """
        these, those = self.ok(one), self.ok(other)
        return exactness.paired(
            (these[r].losses, those[r].losses) for r in sorted(these.keys() & those.keys())
        )

    def _timed(self, point: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.point == point and not trial.deterministic]

    def rates(self, point: str) -> list[float]:
        """Return the point's tokens a second, a repeat each."""
        return [result.tokens_per_s or 0.0 for result in self.ok(point).values()]

    def ratios(self, fast: str, slow: str) -> list[float]:
        """Return how many times faster one point was than another, a round each in which both were
        measured.
        """
        one, other = self.ok(fast), self.ok(slow)
        return [
            (one[r].tokens_per_s or 0.0) / (other[r].tokens_per_s or 1.0)
            for r in sorted(one.keys() & other.keys())
        ]


def measured_row(name: str, kind: str, point: str, found: Measured, shared: Spread) -> Row:
    """Return the line of one point, as far as it needs no other."""
    results = list(found.ok(point).values())
    failed = found.failed(point)
    if not results:
        status, reason = (
            (failed.status, failed.reason)
            if failed
            else ("not-measured", f"not measured: {found.stopped_by} before its turn.")
        )
        return Row(name=name, kind=kind, status=status, reason=reason)
    middle = {
        key: middle_of(results, key) for key in ("step_ms", "data_ms", "host_ms", "device_ms")
    }
    return Row(
        name=name,
        kind=kind,
        reason=f"{failed.status} in one repeat: {failed.reason}" if failed else None,
        repeats=len(results),
        tokens_per_s=median_of(found.rates(point), shared=shared),
        peak_gib=max(
            (result.peak_gib for result in results if result.peak_gib is not None), default=None
        ),
        rows_per_device=results[0].rows_per_device,
        accumulate=results[0].accumulate,
        warmup_steps=round(statistics.median(result.warmup_steps or 0 for result in results)),
        **middle,
    )


def middle_of(results: Sequence[TrialResult], key: str) -> float | None:
    """Return the median of a figure over repeats; None when none has it."""
    values = [value for result in results if (value := getattr(result, key)) is not None]
    return statistics.median(values) if values else None


def ladder_rows(
    ladder: Ladder,
    points: Mapping[str, str],
    found: Measured,
    config: RunConfig,
    *,
    loss_steps: int,
) -> list[Row]:
    """Return the lines of a ladder; `points` names the point whose trials a rung shares,
    `loss_steps` are the losses that judge a promise.
    """
    pairs = {
        rung.name: against
        for rung in ladder.rungs
        if (against := measured_against(rung, ladder, points, found)) is not None
    }
    noise_of_rates = spread(found.rates(point) for point in dict.fromkeys(points.values()))
    ratios = {
        name: gains(ladder.rung(name), against, points, found) for name, against in pairs.items()
    }
    noise_of_gains = spread(ratios.values())
    rows = []
    for rung in ladder.rungs:
        row = measured_row(rung.name, rung.kind, points[rung.name], found, noise_of_rates)
        update: dict[str, object] = {
            "speedup": rung.speedup,
            "speedups": list(rung.speedups),
            "against": rung.against,
            "replaced": list(rung.replaced),
        }
        if rung.name in pairs and ratios[rung.name]:
            gain = median_of(ratios[rung.name], shared=noise_of_gains)
            below = pairs[rung.name].name
            verdict = gain.worth() if rung.kind == "left-out" else gain.verdict()
            if below != rung.against:
                verdict += f", together with what gave no figures, against {below}"
            update |= {"against": below, "gain": gain, "verdict": verdict}
            update |= judged(rung, pairs[rung.name], points, found, config, loss_steps)
        elif rung.against and not found.ok(points[rung.against]):
            update["verdict"] = (
                f"{rung.against} gave no figures"
                if rung.against != ladder.full
                else "the full set gave no figures"
            )
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


def measured_against(
    rung: Rung, ladder: Ladder, points: Mapping[str, str], found: Measured
) -> Rung | None:
    """Return the rung that `rung` is compared with: of an added one the nearest below it that gave
    figures, else the full set alone.

    What leaves one out of the full set says nothing beside any other set.
    """
    below = rung.against
    while below is not None:
        candidate = ladder.rung(below)
        if found.ok(points[below]):
            return candidate
        below = candidate.against if rung.kind == "added" else None
    return None


def gains(rung: Rung, against: Rung, points: Mapping[str, str], found: Measured) -> list[float]:
    """Return how many times faster the rung's speedup makes it, a round each; leaving it out is the
    other way round.
    """
    fast, slow = points[rung.name], points[against.name]
    return found.ratios(slow, fast) if rung.kind == "left-out" else found.ratios(fast, slow)


def judged(
    rung: Rung,
    against: Rung,
    points: Mapping[str, str],
    found: Measured,
    config: RunConfig,
    loss_steps: int,
) -> dict[str, object]:
    """Return what a row says of the losses."""
    pairs = found.loss_pairs(points[rung.name], points[against.name])
    promise = promise_between(rung.speedups, against.speedups)
    if not pairs:
        return {"promise": promise.kind, "promise_reason": "no losses to compare"}
    dropout = float(config.model.own().get("dropout") or 0.0)
    deterministic = (
        promise.kind == "exact" and not found.repeats_to_the_bit and exactness.differ(pairs)
    )
    if deterministic:
        runs = [found.deterministic(points[name]) for name in (rung.name, against.name)]
        if reason := exactness.missing(runs):
            return _apart(pairs) | {"promise": promise.kind, "promise_reason": reason}
        pairs, loss_steps = (
            exactness.paired([tuple(run.losses if run else [] for run in runs)]),
            exactness.STEPS,
        )
    kept, reason = keeps(promise, pairs, loss_steps=loss_steps, dropout=dropout)
    told = {
        "promise": promise.kind,
        "promise_kept": kept,
        "promise_reason": reason,
        "deterministic": deterministic,
    }
    return _apart(pairs) | told


def _apart(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, object]:
    """How far losses differ, and over how many steps."""
    return {
        "loss_difference": largest_difference(pairs),
        "compared_losses": max(len(fast) for fast, _ in pairs),
    }


def keeps(
    promise: Promise,
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    loss_steps: int,
    dropout: float = 0.0,
) -> tuple[bool | None, str]:
    """Say whether losses, (with, without) a repeat each on the same batches, keep a promise, and
    how that was judged.

    Exact and rounding must hold in every repeat. A statistical promise is kept unless the interval
    over at least three seeds of the difference of the final losses lies above 0. Returns None where
    it cannot be judged, as with fewer than `loss_steps` losses that break nothing.
    """
    steps = max(len(fast) for fast, _ in pairs)
    too_few = f"{steps} of {loss_steps} losses: not judged"
    if promise.kind == "statistical":
        if steps < loss_steps:
            return None, too_few
        if len(pairs) < FEWEST_SEEDS:
            return None, f"too few seeds to judge: {len(pairs)} of {FEWEST_SEEDS}"
        low, mean, high = mean_of(
            [
                statistics.fmean(fast[-FINAL_LOSSES:]) - statistics.fmean(plain[-FINAL_LOSSES:])
                for fast, plain in pairs
            ]
        )
        return (
            low <= 0,
            f"final loss {mean:+.4f} ({low:+.4f} to {high:+.4f}) over {len(pairs)} seeds",
        )
    if promise.kind == "rounding" and dropout:
        return None, f"not judged: model.dropout={dropout:g} draws other numbers"
    allowed = "bit-equal" if promise.kind == "exact" else f"within {promise.rtol:.0e}"
    kept = all(promise.holds(fast, plain) for fast, plain in pairs)
    return (
        (None, too_few)
        if kept and steps < loss_steps
        else (kept, f"{steps} losses, {allowed} promised")
    )


def largest_difference(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Return the largest relative difference of a loss."""
    return max(
        abs(a - b) / abs(b) if b else abs(a - b)
        for fast, plain in pairs
        for a, b in zip(fast, plain, strict=True)
    )
