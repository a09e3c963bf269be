"""Gains, intervals and promises, from imaginary trials."""

from __future__ import annotations

import pytest

from flatout.assembly.recipe import Promise
from flatout.measure.experiments.losses import Trials, keeps, largest_difference
from flatout.measure.experiments.points import ladder_rows, unmeasured
from flatout.measure.experiments.records import INTERRUPTED, Row, Trial, TrialResult


def rung(name, kind, speedups=(), speedup=None, against=None):
    return Row(name=name, kind=kind, speedups=list(speedups), speedup=speedup, against=against)


BOTH = ("prefetch", "fused-adamw")
LADDER = [
    rung("baseline", "baseline"),
    rung("+ prefetch", "added", ("prefetch",), "prefetch", "baseline"),
    rung("+ fused-adamw", "added", BOTH, "fused-adamw", "+ prefetch"),
    rung("all but prefetch", "left-out", ("fused-adamw",), "prefetch", "+ fused-adamw"),
    rung("all but fused-adamw", "left-out", ("prefetch",), "fused-adamw", "+ fused-adamw"),
    rung("all and bf16", "put-in", (*BOTH, "bf16"), "bf16", "+ fused-adamw"),
    unmeasured("tf32", "cannot run here, because: it is a CPU."),
]
POINTS = {row.name: row.name for row in LADDER} | {"all but fused-adamw": "+ prefetch"}
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995)
LOSSES = [3.0, 2.5, 2.2]


def ok(point, number, rate, losses=LOSSES, **more):
    facts = {
        "step_ms": 10.0,
        "data_ms": 1.0,
        "host_ms": 2.0,
        "device_ms": 7.0,
        "rows_per_device": 4,
        "accumulate": 2,
        "warmup_steps": 9,
    }
    return Trial(
        point=point,
        round=number,
        seed=number,
        result=TrialResult(status="ok", tokens_per_s=rate, losses=losses, **(facts | more)),
    )


def bad(point, number=0, status="out-of-memory", reason="Out of memory at step 0."):
    return Trial(
        point=point, round=number, seed=number, result=TrialResult(status=status, reason=reason)
    )


def every_round(rates, losses=None):
    losses = losses or {}
    return [
        ok(point, n, rate * noise, losses.get(point, LOSSES))
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
    return {row.name: row for row in ladder_rows(LADDER, POINTS, found)}


def jittered(rates):
    """Rates in which each point has its own noise."""
    return [
        ok(point, n, rate * NOISE[(n + shift) % 5])
        for n in range(5)
        for shift, (point, rate) in enumerate(rates.items())
    ]


def test_gains_have_a_verdict():
    rows = rows_of(jittered(RATES))
    assert rows["baseline"].gain is None
    assert rows["+ prefetch"].verdict == "no measurable gain"
    assert rows["+ fused-adamw"].verdict in {"x1.49", "x1.50", "x1.51"}
    assert rows["+ fused-adamw"].gain.low > 1.4
    assert rows["all and bf16"].verdict.startswith("slower, x0.8")
    assert rows["all but prefetch"].verdict == "worth nothing measurable"


def test_leaving_one_out_gives_its_worth_in_the_full_set():
    row = rows_of(jittered(RATES))["all but fused-adamw"]
    assert row.gain.median == pytest.approx(1.5, rel=0.02)
    assert row.tokens_per_s.median == pytest.approx(100.0, rel=0.02)


def test_repeats_are_paired_so_that_a_drift_of_the_machine_cancels():
    drift = (1.0, 0.8, 0.6, 0.5, 0.4)
    trials = [
        ok(point, n, rate * slow) for n, slow in enumerate(drift) for point, rate in RATES.items()
    ]
    gain = rows_of(trials)["+ fused-adamw"].gain
    assert (gain.low, gain.median, gain.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_rung_that_fails_is_a_row_and_the_next_is_compared_with_the_one_below():
    trials = [trial for trial in every_round(RATES) if trial.point != "+ prefetch"] + [
        bad("+ prefetch")
    ]
    rows = rows_of(trials)
    assert (rows["+ prefetch"].status, rows["+ prefetch"].reason) == (
        "out-of-memory",
        "Out of memory at step 0.",
    )
    assert rows["+ fused-adamw"].against == "baseline"
    assert rows["+ fused-adamw"].gain.median == pytest.approx(1.5)
    assert rows["all but fused-adamw"].status == "out-of-memory"
    assert rows["all but fused-adamw"].gain is None


def test_missing_trials_and_failed_repeats_have_a_reason():
    rows = rows_of(
        [
            ok("baseline", 0, 100.0),
            ok("+ prefetch", 0, 110.0),
            bad("+ prefetch", 1, "failed", "It fell over."),
        ]
    )
    assert rows["+ fused-adamw"].status == "not-measured"
    assert "time was up" in rows["+ fused-adamw"].reason
    assert rows["+ prefetch"].status == "ok"
    assert "It fell over." in rows["+ prefetch"].reason
    assert rows["tf32"].kind == "absent"
    assert rows["tf32"].reason.startswith("cannot run here")


def test_a_single_repeat_is_too_few():
    rows = rows_of([ok("baseline", 0, 100.0), ok("+ prefetch", 0, 130.0)])
    assert rows["+ prefetch"].verdict == "unsure: too few repeats"
    assert rows["+ prefetch"].tokens_per_s.low is None


def test_a_broken_promise_is_caught():
    rows = rows_of(every_round(RATES, {"+ prefetch": [3.0, 2.5, 2.2000001]}))
    assert rows["+ prefetch"].promise_kept is False
    assert rows["+ prefetch"].loss_difference == pytest.approx(4.5e-8, rel=0.1)
    assert rows["+ fused-adamw"].promise_kept is True


NOISY = {"+ prefetch": [3.0, 2.5, 2.2000001]}


def deterministic(point, losses, **more):
    """A run with train.deterministic=true, ten times as slow."""
    return ok(point, 0, 10.0, losses, **more).model_copy(update={"deterministic": True})


def test_deterministic_runs_decide_an_exact_promise_where_runs_are_not_bit_equal():
    ten = [3.0 - 0.1 * step for step in range(10)]
    timed = every_round(RATES, NOISY)
    rows = rows_of(
        [*timed, deterministic("baseline", ten), deterministic("+ prefetch", ten)],
        repeats_to_the_bit=False,
    )
    assert rows["+ prefetch"].promise_kept is True
    assert (
        rows["+ prefetch"].deterministic,
        rows["+ prefetch"].loss_difference,
        rows["+ prefetch"].compared_losses,
    ) == (True, 0.0, 10)
    assert (rows["baseline"].repeats, rows["baseline"].tokens_per_s.median) == (
        5,
        pytest.approx(100.0),
    ), "their figures are in no row"
    broken = [
        *timed,
        deterministic("baseline", ten),
        deterministic("+ prefetch", [*ten[:-1], 2.1000001]),
    ]
    row = rows_of(broken, repeats_to_the_bit=False)["+ prefetch"]
    assert (row.promise_kept, row.deterministic) == (False, True)
    assert row.loss_difference == pytest.approx(5e-8, rel=0.1)


def test_exact_promises_are_undecided_without_deterministic_runs():
    timed = every_round(RATES, NOISY)
    alone, failed = (
        deterministic("baseline", LOSSES),
        bad("+ prefetch", reason="It fell over.").model_copy(update={"deterministic": True}),
    )
    for trials, reason in (
        (timed, "no time for runs with"),
        ([*timed, alone], "no time for runs with"),
        ([*timed, alone, failed], "It fell over."),
    ):
        row = rows_of(trials, repeats_to_the_bit=False)["+ prefetch"]
        assert (row.promise_kept, row.deterministic) == (None, False)
        assert row.loss_difference == pytest.approx(4.5e-8, rel=0.1)
        assert reason in row.promise_reason
        assert row.status == "ok"
    few = rows_of([*timed, alone, deterministic("+ prefetch", LOSSES)], repeats_to_the_bit=False)[
        "+ prefetch"
    ]
    assert (few.promise_kept, few.promise_reason) == (None, "3 of 10 losses: not checked")


def test_equal_losses_need_no_deterministic_run():
    row = rows_of(every_round(RATES), repeats_to_the_bit=False)["+ prefetch"]
    assert (row.promise_kept, row.deterministic) == (True, False)


def test_a_deterministic_run_is_ignored_where_runs_are_bit_equal():
    trials = [
        *every_round(RATES, NOISY),
        deterministic("baseline", LOSSES),
        deterministic("+ prefetch", LOSSES),
    ]
    assert rows_of(trials)["+ prefetch"].promise_kept is False


def test_lengths_of_losses_may_differ_between_rounds_and_points():
    trials = [
        ok("baseline", 0, 100.0, LOSSES),
        ok("+ prefetch", 0, 100.0, LOSSES[:2]),
        ok("+ fused-adamw", 0, 100.0, []),
    ]
    rows = rows_of(trials)
    assert (rows["+ prefetch"].promise_kept, rows["+ prefetch"].promise_reason) == (
        None,
        "2 of 3 losses: not checked",
    )
    assert rows["+ fused-adamw"].promise_kept is None


def test_a_promise_is_kept_only_over_all_losses_and_broken_by_any():
    assert keeps(Promise.exact(), [(LOSSES, LOSSES)], loss_steps=20) == (
        None,
        "3 of 20 losses: not checked",
    )
    assert keeps(Promise.exact(), [([3.0, 2.5, 2.21], LOSSES)], loss_steps=20)[0] is False
    assert keeps(Promise.statistical(), [(LOSSES, LOSSES)] * 3, loss_steps=20) == (
        None,
        "3 of 20 losses: not checked",
    )


def test_after_an_interruption_no_reason_mentions_time():
    row = Trials(stopped_by=INTERRUPTED).measured(LADDER[0], "baseline")
    assert row.reason == "not measured: it was interrupted before its turn."


def test_rounding_is_undecided_with_dropout():
    rows = rows_of(every_round(RATES, {"+ fused-adamw": [3.0, 2.6, 2.1]}), dropout=0.1)
    assert rows["+ fused-adamw"].promise_kept is None
    assert "dropout" in rows["+ fused-adamw"].promise_reason
    assert rows["+ prefetch"].promise_kept is True


def test_exact_and_rounding_must_hold_in_every_repeat():
    equal, off = (LOSSES, LOSSES), ([3.0, 2.5, 2.21], LOSSES)
    assert keeps(Promise.exact(), [equal], loss_steps=3)[0]
    assert not keeps(Promise.exact(), [equal, off], loss_steps=3)[0]
    assert keeps(Promise.rounding(rtol=1e-2), [equal, off], loss_steps=3)[0]
    assert not keeps(Promise.rounding(rtol=1e-3), [equal, off], loss_steps=3)[0]


def test_a_statistical_promise_is_decided_over_seeds():
    better = [([2.0 + seed], [2.1 + seed]) for seed in (0.1, 0.2, 0.3)]
    same = [([2.0 + off], [2.0]) for off in (0.01, -0.02, 0.005, -0.001)]
    worse = [([2.2 + off], [2.0]) for off in (0.01, 0.02, 0.0)]
    assert keeps(Promise.statistical(), better, loss_steps=1)[0]
    assert keeps(Promise.statistical(), same, loss_steps=1)[0]
    assert not keeps(Promise.statistical(), worse, loss_steps=1)[0]
    assert keeps(Promise.statistical(), worse[:2], loss_steps=1) == (
        None,
        "too few seeds to check: 2 of 3",
    )
    unsure = [([2.0 + off], [2.0]) for off in (0.01, 0.02, 0.06)]
    assert keeps(Promise.statistical(), unsure, loss_steps=1)[0], (
        "three that lie on one side may do so by chance"
    )
    assert "3 seeds" in keeps(Promise.statistical(), worse, loss_steps=1)[1]


def test_differences_are_relative():
    assert largest_difference([([2.0, 1.0], [2.0, 1.1])]) == pytest.approx(0.1 / 1.1)
    assert largest_difference([([0.1], [0.0])]) == pytest.approx(0.1)


def test_a_row_contains_the_median_of_its_repeats():
    trials = [
        ok("baseline", n, 100.0, step_ms=step, peak_gib=gib)
        for n, (step, gib) in enumerate([(9.0, 1.0), (10.0, 3.0), (30.0, 2.0)])
    ]
    row = Trials(trials).measured(LADDER[0], "baseline")
    assert (row.step_ms, row.peak_gib, row.repeats, row.warmup_steps) == (10.0, 3.0, 3, 9)


def test_leaving_one_out_is_compared_with_the_full_set_only():
    """Compared with another set, even one with the same trials, the ratio is not its worth."""
    rows = rows_of(
        [
            *every_round({name: rate for name, rate in RATES.items() if name != "+ fused-adamw"}),
            bad("+ fused-adamw"),
        ]
    )
    for name in ("all but prefetch", "all but fused-adamw", "all and bf16"):
        assert rows[name].tokens_per_s is not None
        assert rows[name].gain is None
        assert rows[name].verdict == "the full set gave no figures"
