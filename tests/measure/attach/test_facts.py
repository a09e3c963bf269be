"""Learning rates tell whether a schedule ends long before its run."""

from types import SimpleNamespace

import pytest

from flatout.measure.attach.facts import Rates


@pytest.mark.parametrize(
    ("rate", "halved_after"),
    [
        (lambda step: 0.5 ** (step // 10), 10.0),
        (lambda step: 0.1 ** (step // 10), 3.01),
        (lambda step: 0.9**step, 6.58),
        (lambda step: 0.9999**step, 6931.13),
        (lambda step: 1 - step / 100, None),  # linear
        (lambda step: 0.5 ** (step // 40), None),  # has fallen once
        (lambda step: 0.1 ** ((step >= 10) + (step >= 20)), 3.01),
        (lambda step: min(step, 10) / 10, None),
        (lambda step: 1.0, None),
    ],
)
def test_a_rate_that_falls_by_equal_factors_halves_after_some_steps(rate, halved_after):
    rates = Rates()
    for step in range(60):
        rates.note(SimpleNamespace(param_groups=[{"lr": rate(step)}]))
    found = rates.halved_after()
    assert (found and round(found, 2)) == halved_after
