"""Saves that block and evaluations that take too much: what is advised."""

from __future__ import annotations

import pytest

from flatout.measure.rules.host import frequent_evaluation, slow_save
from flatout.measure.steps.evidence import Evidence, Phases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_ours", [True, False], ids=["recipe", "watched"])
def test_a_thread_that_saves_in_the_background_is_advised_on_a_gpu_only(
    tiny_config, device, is_ours
):
    evidence = Evidence(
        source="measured run",
        config=tiny_config() if is_ours else None,
        device=device,
        step_s=0.1,
        phases=Phases(checkpoint_s=0.03),
    )
    found = slow_save.look(evidence)
    assert found.share == pytest.approx(0.3)
    assert any("background" in fix.text for fix in found.fixes) == (device == "cuda")


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
        fixes = frequent_evaluation.look(evidence).fixes
        return [fix for fix in fixes if "train.eval_every" in fix.overrides]

    (fix,) = less_often(10)
    assert fix.overrides == {"train.eval_every": 60}
    assert fix.gain == pytest.approx(0.9 * 5 / 6)
    assert less_often(60) == []
