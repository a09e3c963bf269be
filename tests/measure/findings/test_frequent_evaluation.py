"""Evaluations that take too much of a run."""

from __future__ import annotations

import pytest

from flatout.measure.findings.frequent_evaluation import FINDING
from flatout.measure.instruments.evidence import Evidence, Phases


def test_evaluations_are_not_put_beyond_the_end_of_the_run(tiny_config):
    def less_often(every):
        config = tiny_config().with_values({"train.eval_every": every, "train.steps": 60})
        evidence = Evidence(
            source="measured run",
            config=config,
            step_s=0.1,
            phases=Phases(evaluation_s=0.09),
            planned_steps=60,
        )
        fixes = FINDING.look(evidence).fixes
        return [fix for fix in fixes if "train.eval_every" in fix.overrides]

    (fix,) = less_often(10)
    assert fix.overrides == {"train.eval_every": 60}
    assert fix.gain == pytest.approx(0.9 * 5 / 6)
    assert less_often(60) == []
