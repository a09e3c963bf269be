"""--fix keeps a fix only if it holds."""

from __future__ import annotations

import pytest

from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.measure.diagnose.diagnosis import Diagnosis, Finding, Fix
from flatout.measure.diagnose.fix import applied, try_fixes, write_recipe
from flatout.measure.steps.evidence import Evidence, Failure, Roofline

PREFETCH = Fix(text="Add prefetch.", overrides={"speedups": "+prefetch"}, gain=0.3)
ROWS = Fix(text="More rows.", overrides={"log.every": 7}, gain=0.2)
CHANGES = Fix(text="Lower lr.", overrides={"optim.lr": 1e-4}, same_result=False)
BY_HAND = Fix(text="Buy a disk.", gain=0.9)


def diagnosis(*fixes, harm="slows"):
    finding = Finding(name="slow-data", verdict="It waits.", harm=harm, fixes=fixes)
    facts = {
        "verdict": "It waits.",
        "source": "measured run",
        "step_s": 0.1,
        "roofline": Roofline(),
    }
    nothing = {"shares": {}, "counterfactual_s": {}, "notes": ()}
    return Diagnosis(**facts, **nothing, findings=(finding,))


@pytest.fixture
def evidence(tiny_config):
    return Evidence(
        source="measured run", config=tiny_config(speedups="none"), step_s=0.1, remaining_s=3600
    )


def machine(speed_of):
    """Return a measurement whose step time is 0.1 s over a speed by configuration and call."""
    calls = []

    def measure(config):
        calls.append(config)
        speed = speed_of(config, len(calls))
        if speed is None:
            failure = Failure(kind="error", message="It breaks.")
            return Evidence(source="measured run", config=config, failure=failure)
        facts = {"step_s": 0.1 / speed, "tokens_per_step": 100}
        return Evidence(source="measured run", config=config, **facts)

    return measure, calls


def has_prefetch(config):
    return "prefetch" in config.speedups


def test_a_fix_that_is_faster_in_every_pair_is_kept(evidence):
    measure, calls = machine(lambda config, call: (1.3 if has_prefetch(config) else 1) + call / 999)
    (found,) = try_fixes(evidence, diagnosis(PREFETCH, BY_HAND, CHANGES), measure)
    assert found.kept
    assert found.gain == pytest.approx(1.3, abs=0.02)
    assert found.gain_low > 1
    assert len(calls) == 6
    # they take turns at being first
    assert [has_prefetch(config) for config in calls] == [False, True, True, False, False, True]


def test_a_fix_without_a_clear_gain_is_not_kept_and_the_next_is_tried(evidence):
    noise = [1.0, 1.2, 0.9, 1.1, 1.3, 1.0] * 2
    measure, calls = machine(lambda config, call: noise[call - 1])
    first, second = try_fixes(evidence, diagnosis(PREFETCH, ROWS), measure)
    assert (first.kept, second.kept) == (False, False)
    assert "not kept" in first.reason
    assert len(calls) == 12


def test_a_fix_for_a_run_that_does_not_work_only_has_to_work(evidence):
    measure, _ = machine(lambda config, call: None if has_prefetch(config) else 1)
    (found,) = try_fixes(evidence, diagnosis(PREFETCH), measure)
    assert not found.kept
    assert found.reason == "The run fails with it: It breaks."
    measure, calls = machine(lambda config, call: 1.0)
    broken = evidence.model_copy(update={"step_s": None})
    (found,) = try_fixes(broken, diagnosis(PREFETCH, harm="fails"), measure)
    assert (found.kept, found.gain) == (True, None)
    assert len(calls) == 1


def test_nothing_is_tried_without_a_recipe_or_a_fix_that_keeps_the_result(evidence):
    measure, calls = machine(lambda config, call: 1.0)
    assert try_fixes(evidence, diagnosis(CHANGES, BY_HAND), measure) == []
    assert try_fixes(Evidence(source="watched loop"), diagnosis(PREFETCH), measure) == []
    assert calls == []


@pytest.mark.parametrize(
    ("speedups", "edit", "expected"),
    [
        ("auto", "-compile", "auto,-compile"),
        ("auto,-compile", "+compile", "auto,+compile"),
        (["prefetch", "compile"], "-compile", "prefetch"),
        (["prefetch", "compile"], "+tf32", "prefetch,compile,tf32"),
        ("none", "+tf32", "tf32"),
    ],
)
def test_edits_of_the_speedups_are_applied(tiny_config, speedups, edit, expected):
    config = tiny_config(speedups=speedups)
    assert applied(config, {"speedups": edit}).speedups == expected
    with pytest.raises(ConfigError):
        applied(config, {"optim.lr": -1})


def test_the_written_recipe_is_one_that_train_takes(evidence, tmp_path, tiny_config):
    measure, _ = machine(lambda config, call: 1.3 if has_prefetch(config) else 1)
    tried = try_fixes(evidence, diagnosis(PREFETCH), measure)
    config = tiny_config(speedups="none", train__epochs=2.0, train__steps=None)
    config, path = applied(config, {"speedups": "+prefetch"}), tmp_path / "fixed.yaml"
    write_recipe(path, config, tried)
    assert load_config(path).to_dict() == config.to_dict()
    first, second, *_ = path.read_text().splitlines()
    assert first.startswith("# tiny, with the fix")
    assert second.startswith("# slow-data: Add prefetch. x1.30")
