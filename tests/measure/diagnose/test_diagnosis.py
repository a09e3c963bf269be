"""A diagnosis: its order, its verdict, which fix comes first, and its text."""

from __future__ import annotations

import json

import pytest

from flatout.display import terminal_text
from flatout.measure.diagnose import diagnosis
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.rules import Finding, Fix, Rule, rules
from flatout.measure.steps.evidence import CallSite, Evidence

STEPS = Evidence(
    source="measured run",
    step_s=0.1,
    compute_s=0.08,
    optimizer_s=0.01,
    data_wait_s=0.001,
    mfu=0.41,
)
SITE = CallSite(file="mine.py", line=7, text="slow()")


def rule(name, harm="slows", share=None, *, unless=(), **more):
    found = Finding(name=name, verdict=f"{name} is the cause.", harm=harm, share=share, **more)
    return Rule(name, "Finds it.", lambda _: found, unless)


@pytest.fixture
def with_rules(monkeypatch):
    """Replace the rules by some that always find what their name says."""
    return lambda *given: monkeypatch.setattr(diagnosis, "rules", lambda: list(given))


def names(evidence=STEPS):
    return [one.name for one in diagnosis_of(evidence).findings]


def test_every_rule_is_silent_without_evidence_and_names_others_that_exist():
    known = {one.name for one in rules()}
    assert len(known) == len(rules()) > 30
    for one in rules():
        assert one.look(Evidence(source="preflight")) is None, one.name
        assert {*one.unless} <= known, one.name


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ([("a", "slows", 0.2), ("b", "slows", 0.4), ("c", "warns"), ("d", "fails")], "dbac"),
        ([("a", "slows", 0.9), ("busy-machine", "slows", 0.2), ("x", "spoils")], "xba"),
        ([("a", "slows", 0.9), ("b", "slows", None)], "ba"),  # its time was not measured
    ],
)
def test_the_worst_finding_gives_the_verdict(with_rules, given, order):
    with_rules(*(rule(*one) for one in given))
    assert "".join(name[0] for name in names()) == order
    found = diagnosis_of(STEPS)
    assert found.verdict == found.findings[0].verdict
    assert not found.is_healthy


def test_a_clear_line_of_a_script_comes_before_a_busy_machine(with_rules):
    with_rules(rule("busy-machine", share=0.5), rule("line", share=0.2, site=SITE))
    assert names() == ["busy-machine", "line"]
    assert names(STEPS.model_copy(update={"source": "script"})) == ["line", "busy-machine"]


def test_a_specific_cause_silences_the_general_one(with_rules):
    idle, sync = rule("idle", share=0.9, unless=("sync",)), rule("sync", share=0.5)
    for given, name in (([idle, sync], "sync"), ([idle], "idle")):
        with_rules(*given)
        assert names() == [name]


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (
            {"other_busy_cores": 0.1},
            "Nothing holds this run back: 90% of each step is computation, 41% of the peak matmul "
            "rate.",
        ),
        ({"device": "cpu"}, "Nothing was found: 90%*Other use of the cores was not measured."),
        ({"device": "cuda"}, "Nothing was found: 90%*Other use of the GPU was not measured."),
        (
            {"compute_s": 0.03, "data_wait_s": 0.05},
            "Nothing was found, but only 40%*50% is data wait.",
        ),
        ({"step_s": None}, "Nothing keeps this run from starting."),
    ],
)
def test_a_healthy_verdict_says_what_was_measured_in_words(with_rules, facts, verdict):
    with_rules()
    found = diagnosis_of(STEPS.model_copy(update=facts))
    start, _, end = verdict.partition("*")
    assert found.is_healthy
    assert found.verdict.startswith(start)
    assert found.verdict.endswith(end)


def test_fixes_are_ranked_by_what_they_save_in_the_time_left(with_rules):
    quick = Fix(text="Quick.", gain=0.1)
    compiled = Fix(text="Compile.", gain=0.3, cost_s=60)
    unknown = Fix(text="Unknown.")
    for fixes, remaining_s, order in (
        ((unknown, quick, compiled), 3600, (compiled, quick, unknown)),
        # 60 s of compiling do not pay off in a run of a minute
        ((compiled, unknown, quick), 60, (quick, unknown, compiled)),
        ((quick, compiled), None, (compiled, quick)),
    ):
        with_rules(rule("slow", fixes=fixes))
        (ranked,) = diagnosis_of(STEPS.model_copy(update={"remaining_s": remaining_s})).findings
        assert [fix.text for fix in ranked.fixes] == [fix.text for fix in order]


def test_findings_json_is_strict_json_with_a_format_version(with_rules, tmp_path):
    with_rules(rule("a", share=0.2))
    path = diagnosis_of(STEPS).write(tmp_path)
    assert path == tmp_path / "findings.json"
    stored = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert stored["format_version"] == 2
    assert stored["verdict"] == "a is the cause."
    assert stored["findings"][0]["share"] == 0.2
    assert stored["roofline"] | {"mfu": None} == dict.fromkeys(diagnosis.ROOFLINE)


def test_the_text_shows_the_step_the_findings_and_the_rate_with_and_without_saves(with_rules):
    fixes = (Fix(text="Remove it.", gain=0.2, gain_from="the step without it"),)
    with_rules(rule("slow", share=0.2, site=SITE, figures={"slow_ms": 20.0}, fixes=fixes))
    evidence = Evidence(
        source="measured run",
        step_s=0.2,
        compute_s=0.1,
        evaluation_s=0.06,
        checkpoint_s=0.04,
        gc_s=0.0002,
        tokens_per_s=1000.0,
        peak_tflops=0.2,
        peak_source="measured here",
        mfu=0.5,
        steps=1,
        planned_steps=18_000,
        train_tokens=1_000_000,
        val_tokens=10_000,
        epochs=2.5,
        notes=("Oh.",),
    )
    found = diagnosis_of(evidence).model_copy(update={"next": "`flatout tune my.yaml`"})
    assert found.summary() == (
        "slow is the cause.\n"
        "Training  about 1 h 00 min for 18,000 steps\n"
        "Dataset   1,000,000 tokens, read 2.5 times, and 10,000 for validation\n"
        "Rate      1,000 tokens/s, 500 with saves and evaluations\n"
        "Peak      50.0% of 0.2 TFLOP/s (measured here)\n\n"
        "A step takes 200 ms, on average of 1 step:\n"
        "  compute     50%  100 ms  ##########\n"
        "  evaluation  30%   60 ms  ######\n"
        "  saving      20%   40 ms  ####\n\n"
        "1. slow: slow is the cause.\n"
        "   at        mine.py:7: slow()\n"
        "   evidence  slow 20 ms\n"
        "   fix       Remove it. It should save about 20% of each step (from the step without "
        "it).\n\n"
        "Note: Oh.\n"
        "Next: `flatout tune my.yaml`"
    )
    assert max(map(len, terminal_text(found.display(), 60).splitlines())) <= 60
