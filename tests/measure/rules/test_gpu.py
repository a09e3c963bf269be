"""A power cap that every large GPU reaches is no finding; heat and lowered limits are."""

from __future__ import annotations

from flatout.measure.rules.gpu import throttling
from flatout.measure.steps.evidence import Evidence, GpuFacts


def found(**facts):
    return throttling.look(Evidence(source="measured run", device="cuda", gpu=GpuFacts(**facts)))


def test_a_full_power_budget_is_no_throttling():
    assert found(slowed_by=("its power cap",), clock_share=0.93) is None
    assert found(slowed_by=("its power cap",), clock_share=0.7).harm == "slows"
    assert found(power_limit_share=0.6).harm == "warns"
    assert found(slowed_by=("heat (driver)",), clock_share=0.95).share is not None
    assert found() is None
