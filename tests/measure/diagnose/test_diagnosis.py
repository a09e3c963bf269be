"""A diagnosis: its order, its verdict, and which fix comes first."""

from __future__ import annotations

import json

import pytest

from flatout.measure.diagnose import diagnosis
from flatout.measure.diagnose.diagnosis import diagnosis_of, ranked, rules
from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence, Phases, Roof

STEPS = Evidence(
    source="measured run",
    step_s=0.1,
    phases=Phases(compute_s=0.08, optimizer_s=0.01, data_wait_s=0.001),
    roof=Roof(mfu=0.41),
)


def rule(name, harm="slows", share=None, **more):
    found = Finding(verdict=f"{name} is the cause.", harm=harm, share=share)
    return FindingRule(name=name, look=lambda _: found, **more)


@pytest.fixture
def with_rules(monkeypatch):
    """Replace the rules by some that always find what their name says."""
    return lambda *given: monkeypatch.setattr(diagnosis, "rules", lambda: list(given))


def test_every_rule_has_the_name_of_its_file_and_is_silent_without_evidence():
    from flatout.registry import FINDINGS

    assert [one.name for one in rules()] == FINDINGS.names()
    for one in rules():
        assert one.look(Evidence(source="preflight")) is None, one.name
        assert {*one.unless} <= {*FINDINGS.names()}, one.name


def test_the_worst_finding_gives_the_verdict(with_rules):
    with_rules(rule("a", share=0.2), rule("b", share=0.4), rule("c", "warns"), rule("d", "fails"))
    found = diagnosis_of(STEPS)
    assert [one.name for one in found.findings] == ["d", "b", "a", "c"]
    assert found.verdict == "d is the cause."
    assert not found.is_healthy


def test_a_specific_cause_silences_the_general_one(with_rules):
    with_rules(rule("idle", share=0.9, unless=("sync",)), rule("sync", share=0.5))
    assert [one.name for one in diagnosis_of(STEPS).findings] == ["sync"]
    with_rules(rule("idle", share=0.9, unless=("sync",)))
    assert [one.name for one in diagnosis_of(STEPS).findings] == ["idle"]


def test_a_healthy_run_has_a_verdict_and_no_findings(with_rules):
    with_rules()
    found = diagnosis_of(STEPS)
    assert found.is_healthy
    assert found.verdict == (
        "Nothing holds this run back: 90% of each step is computation, 41% of the peak of matrix"
        " products."
    )
    before = diagnosis_of(Evidence(source="preflight"))
    assert before.verdict == "Nothing stands in the way of this run."
    assert before.step_s is None
    assert before.shares == {}


def test_fixes_are_ranked_by_what_they_save_in_the_time_left():
    quick = Fix(text="Quick.", gain=0.1)
    compiled = Fix(text="Compile.", gain=0.3, cost_s=60)
    unknown = Fix(text="Unknown.")
    assert [fix.text for fix in ranked((unknown, quick, compiled), 3600)] == [
        "Compile.",
        "Quick.",
        "Unknown.",
    ]
    # 60 s of compiling do not pay off in a run of a minute
    assert [fix.text for fix in ranked((compiled, unknown, quick), 60)] == [
        "Quick.",
        "Unknown.",
        "Compile.",
    ]
    assert [fix.text for fix in ranked((quick, compiled), None)] == ["Compile.", "Quick."]
    assert compiled.saved_s(None) is None


def test_fixes_of_failures_come_before_gains(with_rules):
    def found(harm, gain, text):
        fixes = (Fix(text=text, gain=gain),)
        return FindingRule(
            name=text,
            look=lambda _: Finding(verdict=text, harm=harm, fixes=fixes),
        )

    with_rules(found("slows", 0.5, "faster"), found("fails", None, "works"))
    assert [fix.text for _, fix in diagnosis_of(STEPS).fixes(100)] == ["works", "faster"]


def test_findings_json_is_strict_json_with_a_format_version(with_rules, tmp_path):
    with_rules(rule("a", share=0.2))
    path = diagnosis_of(STEPS).write(tmp_path)
    assert path == tmp_path / "findings.json"
    stored = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert stored["format_version"] == 1
    assert stored["verdict"] == "a is the cause."
    assert stored["findings"][0]["share"] == 0.2
    assert stored["roof"]["peak_tflops"] is None
