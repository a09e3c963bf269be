"""The rate of a run's steps excludes everything else."""

import pytest

from flatout.cli.terminal.panel import Pace


def test_the_rate_is_unknown_before_two_steps_and_a_second():
    now = [0.0]
    pace = Pace(100, lambda: now[0])
    assert pace.rates() is None
    pace.tick(5)
    now[0] = 0.5
    pace.tick(6)
    assert pace.rates() is None
    now[0] = 2.0
    assert pace.rates() == (0.5, 50.0)
    assert not pace.is_steady


def test_records_replace_the_clock_from_the_second_one_and_those_without_rates_are_ignored():
    pace = Pace(100, lambda: 0.0)
    for record in ({"val/loss": 1.0}, {"perf/steps_per_s": 9.0, "perf/tokens_per_s": 900.0}):
        pace.record(record)
        assert not pace.is_steady
    pace.record({"perf/steps_per_s": 3.0, "perf/tokens_per_s": 290.0})
    assert pace.is_steady
    assert pace.rates() == (3.0, 290.0)


@pytest.mark.parametrize(
    ("rates", "median"),
    [([4, 4, 4, 1], 4), ([1, 1, 1, 4, 4, 4], 4)],
    ids=["one slow record", "a change that stays"],
)
def test_the_rate_is_the_median_of_the_latest_records(rates, median):
    pace = Pace(100, lambda: 0.0)
    for steps_per_s in [99, *rates]:
        pace.record({"perf/steps_per_s": steps_per_s, "perf/tokens_per_s": 100 * steps_per_s})
    assert pace.rates() == (median, 100 * median)
