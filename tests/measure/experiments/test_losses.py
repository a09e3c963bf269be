"""Gains, intervals and tolerances, from imaginary trials."""

from __future__ import annotations

import pytest

from flatout.assembly.recipe import Tolerance
from flatout.measure.experiments.losses import Trials, is_within, largest_difference
from flatout.measure.experiments.points import ablation_rows, unmeasured
from flatout.measure.experiments.records import INTERRUPTED, Row, Trial, TrialResult


def row(name, kind, speedups=(), speedup=None, against=None):
    return Row(name=name, kind=kind, speedups=list(speedups), speedup=speedup, against=against)


BOTH = ("prefetch", "fused-adamw")
ABLATION = [
    row("baseline", "baseline"),
    row("+ prefetch", "added", ("prefetch",), "prefetch", "baseline"),
    row("+ fused-adamw", "added", BOTH, "fused-adamw", "+ prefetch"),
    row("all but prefetch", "leave-one-out", ("fused-adamw",), "prefetch", "+ fused-adamw"),
    row("all but fused-adamw", "leave-one-out", ("prefetch",), "fused-adamw", "+ fused-adamw"),
    row("all and bf16", "add-one", (*BOTH, "bf16"), "bf16", "+ fused-adamw"),
    unmeasured("tf32", "cannot run here, because: it is a CPU."),
]
POINTS = {row.name: row.name for row in ABLATION} | {"all but fused-adamw": "+ prefetch"}
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995)
LOSSES = [3.0, 2.5, 2.2]


def ok(point, number, rate, losses=LOSSES, **more):
    facts = {"step_ms": 10.0, "data_ms": 1.0, "host_ms": 2.0, "device_ms": 7.0}
    facts |= {"rows_per_device": 4, "accumulate": 2, "warmup_steps": 9, **more}
    result = TrialResult(status="ok", tokens_per_s=rate, losses=losses, **facts)
    return Trial(point=point, round=number, seed=number, result=result)


def bad(point, number=0, status="out-of-memory", reason="Out of memory at step 0."):
    result = TrialResult(status=status, reason=reason)
    return Trial(point=point, round=number, seed=number, result=result)


def every_round(rates, losses=None):
    return [
        ok(point, n, rate * noise, (losses or {}).get(point, LOSSES))
        for n, noise in enumerate(NOISE)
        for point, rate in rates.items()
    ]


RATES = {
    "baseline": 100.0,
    "+ prefetch": 100.0,
    "+ fused-adamw": 150.0,
    "all but prefetch": 149.9,
    "all and bf16": 120.0,
}


def rows_of(trials, *, dropout=0.0, loss_steps=3, repeats_to_the_bit=True):
    found = Trials(trials, repeats_to_the_bit, dropout, loss_steps)
    return {row.name: row for row in ablation_rows(ABLATION, POINTS, found)}


def test_gains_have_a_verdict():
    trials = [
        ok(point, n, rate * NOISE[(n + shift) % 5])  # each point has its own noise
        for n in range(5)
        for shift, (point, rate) in enumerate(RATES.items())
    ]
    rows = rows_of(trials)
    assert rows["baseline"].gain is None
    assert rows["+ prefetch"].verdict == "no measurable gain"
    assert rows["+ fused-adamw"].verdict in {"x1.49", "x1.50", "x1.51"}
    assert rows["+ fused-adamw"].gain.low > 1.4
    assert rows["all and bf16"].verdict.startswith("slower, x0.8")
    assert rows["all but prefetch"].verdict == "worth nothing measurable"
    worth = rows["all but fused-adamw"]
    assert worth.gain.median == pytest.approx(1.5, rel=0.02)
    assert worth.tokens_per_s.median == pytest.approx(100.0, rel=0.02)


def test_repeats_are_paired_so_that_a_drift_of_the_machine_cancels():
    drift = (1.0, 0.8, 0.6, 0.5, 0.4)
    trials = [
        ok(point, n, rate * slow) for n, slow in enumerate(drift) for point, rate in RATES.items()
    ]
    gain = rows_of(trials)["+ fused-adamw"].gain
    assert (gain.low, gain.median, gain.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_trial_that_fails_is_a_row_and_the_next_is_compared_with_the_one_below():
    trials = [trial for trial in every_round(RATES) if trial.point != "+ prefetch"]
    rows = rows_of([*trials, bad("+ prefetch")])
    failed, worth = rows["+ prefetch"], rows["all but fused-adamw"]
    assert (failed.status, failed.reason) == ("out-of-memory", "Out of memory at step 0.")
    assert rows["+ fused-adamw"].against == "baseline"
    assert rows["+ fused-adamw"].gain.median == pytest.approx(1.5)
    assert (worth.status, worth.gain) == ("out-of-memory", None)


def test_missing_trials_and_failed_repeats_have_a_reason():
    failed = bad("+ prefetch", 1, "failed", "It fell over.")
    rows = rows_of([ok("baseline", 0, 100.0), ok("+ prefetch", 0, 130.0), failed])
    assert rows["+ fused-adamw"].status == "not-measured"
    assert "time was up" in rows["+ fused-adamw"].reason
    assert rows["+ prefetch"].status == "ok"
    assert "It fell over." in rows["+ prefetch"].reason
    assert rows["+ prefetch"].verdict == "unsure: too few repeats"
    assert rows["+ prefetch"].tokens_per_s.low is None
    assert rows["tf32"].kind == "absent"
    assert rows["tf32"].reason.startswith("cannot run here")
    row = Trials(stopped_by=INTERRUPTED).measured(ABLATION[0], "baseline")
    assert row.reason == "not measured: it was interrupted before its turn."


def test_losses_out_of_tolerance_are_caught():
    timed = every_round(RATES, NOISY)
    rows = rows_of(timed)
    assert rows["+ prefetch"].within_tolerance is False
    assert rows["+ prefetch"].loss_difference == pytest.approx(4.5e-8, rel=0.1)
    assert rows["+ fused-adamw"].within_tolerance is True
    alike = [deterministic(name, LOSSES) for name in ("baseline", "+ prefetch")]
    assert rows_of([*timed, *alike])["+ prefetch"].within_tolerance is False, "runs repeat here"
    row = rows_of(every_round(RATES), repeats_to_the_bit=False)["+ prefetch"]
    assert (row.within_tolerance, row.deterministic) == (True, False)


NOISY = {"+ prefetch": [3.0, 2.5, 2.2000001]}


def deterministic(point, losses, **more):
    """A run with train.deterministic=true, ten times as slow."""
    return ok(point, 0, 10.0, losses, **more).model_copy(update={"deterministic": True})


def test_deterministic_runs_decide_an_exact_tolerance_where_runs_are_not_bit_equal():
    ten = [3.0 - 0.1 * step for step in range(10)]
    for losses, kept, apart in ((ten, True, 0.0), ([*ten[:-1], 2.1000001], False, 5e-8)):
        trials = [deterministic("baseline", ten), deterministic("+ prefetch", losses)]
        rows = rows_of([*every_round(RATES, NOISY), *trials], repeats_to_the_bit=False)
        row = rows["+ prefetch"]
        assert (row.within_tolerance, row.deterministic, row.compared_losses) == (kept, True, 10)
        assert row.loss_difference == pytest.approx(apart, rel=0.1)
        assert rows["baseline"].repeats == 5, "their results are in no row"
        assert rows["baseline"].tokens_per_s.median == pytest.approx(100.0)


def test_exact_tolerances_are_undecided_without_deterministic_runs():
    timed, alone = every_round(RATES, NOISY), deterministic("baseline", LOSSES)
    failed = bad("+ prefetch", reason="It fell over.").model_copy(update={"deterministic": True})
    for trials, reason in (
        ([], "no time for runs with"),
        ([alone], "no time for runs with"),
        ([alone, failed], "It fell over."),
    ):
        row = rows_of([*timed, *trials], repeats_to_the_bit=False)["+ prefetch"]
        assert (row.within_tolerance, row.deterministic, row.status) == (None, False, "ok")
        assert row.loss_difference == pytest.approx(4.5e-8, rel=0.1)
        assert reason in row.tolerance_reason
    trials = [*timed, alone, deterministic("+ prefetch", LOSSES)]
    few = rows_of(trials, repeats_to_the_bit=False)["+ prefetch"]
    assert (few.within_tolerance, few.tolerance_reason) == (None, "3 of 10 losses: not checked")


def test_a_tolerance_holds_only_over_all_losses_and_any_can_exceed_it():
    exact, equal, off = Tolerance.exact(), (LOSSES, LOSSES), ([3.0, 2.5, 2.21], LOSSES)
    few = (None, "3 of 20 losses: not checked")
    assert is_within(exact, [equal], loss_steps=20) == few
    assert is_within(Tolerance.statistical(), [equal] * 3, loss_steps=20) == few
    assert is_within(exact, [off], loss_steps=20)[0] is False
    assert is_within(exact, [equal], loss_steps=3)[0]
    assert not is_within(exact, [equal, off], loss_steps=3)[0]
    assert is_within(Tolerance.rounding(rtol=1e-2), [equal, off], loss_steps=3)[0]
    assert not is_within(Tolerance.rounding(rtol=1e-3), [equal, off], loss_steps=3)[0]
    shorter = {"+ prefetch": LOSSES[:2], "+ fused-adamw": []}
    rows = rows_of([ok(name, 0, 100.0, shorter.get(name, LOSSES)) for name in RATES])
    assert rows["+ prefetch"].tolerance_reason == "2 of 3 losses: not checked"
    assert rows["+ prefetch"].within_tolerance is rows["+ fused-adamw"].within_tolerance is None


def test_rounding_is_undecided_with_dropout():
    rows = rows_of(every_round(RATES, {"+ fused-adamw": [3.0, 2.6, 2.1]}), dropout=0.1)
    assert rows["+ fused-adamw"].within_tolerance is None
    assert "dropout" in rows["+ fused-adamw"].tolerance_reason
    assert rows["+ prefetch"].within_tolerance is True


def test_a_statistical_tolerance_is_decided_over_seeds():
    def keeps_over(pairs):
        return is_within(Tolerance.statistical(), pairs, loss_steps=1)

    worse = [([2.2 + off], [2.0]) for off in (0.01, 0.02, 0.0)]
    assert keeps_over([([2.0 + seed], [2.1 + seed]) for seed in (0.1, 0.2, 0.3)])[0]
    assert keeps_over([([2.0 + off], [2.0]) for off in (0.01, -0.02, 0.005, -0.001)])[0]
    assert not keeps_over(worse)[0]
    assert "3 seeds" in keeps_over(worse)[1]
    assert keeps_over(worse[:2]) == (None, "too few seeds to check: 2 of 3")
    by_chance = [([2.0 + off], [2.0]) for off in (0.01, 0.02, 0.06)]
    assert keeps_over(by_chance)[0], "three that lie on one side may do so by chance"


def test_differences_are_relative():
    assert largest_difference([([2.0, 1.0], [2.0, 1.1])]) == pytest.approx(0.1 / 1.1)
    assert largest_difference([([0.1], [0.0])]) == pytest.approx(0.1)


def test_a_row_contains_the_median_of_its_repeats():
    trials = [
        ok("baseline", n, 100.0, step_ms=step, peak_gib=gib)
        for n, (step, gib) in enumerate([(9.0, 1.0), (10.0, 3.0), (30.0, 2.0)])
    ]
    row = Trials(trials).measured(ABLATION[0], "baseline")
    assert (row.step_ms, row.peak_gib, row.repeats, row.warmup_steps) == (10.0, 3.0, 3, 9)


def test_leaving_one_out_is_compared_with_the_full_set_only():
    """Compared with another set, even one with the same trials, the ratio is not its worth."""
    rates = {name: rate for name, rate in RATES.items() if name != "+ fused-adamw"}
    rows = rows_of([*every_round(rates), bad("+ fused-adamw")])
    for name in ("all but prefetch", "all but fused-adamw", "all and bf16"):
        assert rows[name].tokens_per_s is not None
        assert (rows[name].gain, rows[name].verdict) == (None, "the full set was not measured")
