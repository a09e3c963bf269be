"""A diagnosis: its order, its verdict, and which fix comes first."""

from __future__ import annotations

import json

import pytest

from flatout.measure.diagnose import diagnosis
from flatout.measure.diagnose.diagnosis import Finding, Fix, Rule, diagnosis_of, rules
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.steps.evidence import Evidence, GpuFacts, HostFacts, Phases, Roofline
from flatout.storage.json_io import append_line
from flatout.training.run_dir import layout

STEPS = Evidence(
    source="measured run",
    step_s=0.1,
    phases=Phases(compute_s=0.08, optimizer_s=0.01, data_wait_s=0.001),
    roofline=Roofline(mfu=0.41),
)


def rule(name, harm="slows", share=None, **more):
    found = Finding(verdict=f"{name} is the cause.", harm=harm, share=share)
    return Rule(lambda _: found, name, **more)


@pytest.fixture
def with_rules(monkeypatch):
    """Replace the rules by some that always find what their name says."""
    return lambda *given: monkeypatch.setattr(diagnosis, "rules", lambda: list(given))


def test_every_rule_is_silent_without_evidence_and_names_others_that_exist():
    names = {one.name for one in rules()}
    assert len(names) == len(rules()) > 30
    for one in rules():
        assert one.look(Evidence(source="preflight")) is None, one.name
        assert {*one.unless} <= names, one.name


def test_the_worst_finding_gives_the_verdict(with_rules):
    with_rules(rule("a", share=0.2), rule("b", share=0.4), rule("c", "warns"), rule("d", "fails"))
    found = diagnosis_of(STEPS)
    assert [one.name for one in found.findings] == ["d", "b", "a", "c"]
    assert found.verdict == "d is the cause."
    assert not found.is_healthy
    with_rules(rule("slow-data", share=0.9), rule("busy-machine", share=0.2), rule("x", "spoils"))
    names = [one.name for one in diagnosis_of(STEPS).findings]
    assert names == ["x", "busy-machine", "slow-data"], "other processes come before what is slow"


def test_a_specific_cause_silences_the_general_one(with_rules):
    idle, sync = rule("idle", share=0.9, unless=("sync",)), rule("sync", share=0.5)
    for given, name in (([idle, sync], "sync"), ([idle], "idle")):
        with_rules(*given)
        assert [one.name for one in diagnosis_of(STEPS).findings] == [name]


def test_a_healthy_run_has_a_verdict_and_no_findings(with_rules):
    with_rules()
    found = diagnosis_of(STEPS.model_copy(update={"host": HostFacts(other_busy_cores=0.1)}))
    assert found.is_healthy
    assert found.verdict == (
        "Nothing holds this run back: 90% of each step is computation, 41% of the peak matmul rate."
    )
    before = diagnosis_of(Evidence(source="preflight"))
    assert before.verdict == "Nothing keeps this run from starting."
    assert before.step_s is None
    assert before.shares == {}


@pytest.mark.parametrize(
    ("update", "unknown"),
    [
        ({"device": "cpu"}, "cores"),
        ({"device": "cuda"}, "GPU"),
        ({"device": "cuda", "gpu": GpuFacts(utilisation=0.9)}, "GPU"),
    ],
)
def test_what_was_not_measured_is_not_said_to_be_absent(with_rules, update, unknown):
    with_rules()
    verdict = diagnosis_of(STEPS.model_copy(update=update)).verdict
    assert verdict.startswith("Nothing was found: 90% of each step is computation")
    assert verdict.endswith(f"Other use of the {unknown} was not measured.")


def test_a_step_that_computes_little_names_what_it_does_in_words(with_rules):
    with_rules()
    waits = STEPS.model_copy(update={"phases": Phases(compute_s=0.03, data_wait_s=0.05)})
    assert "50% is data wait." in diagnosis_of(waits).verdict


def record_run(folder, others):
    folder.mkdir()
    layout.append_event(folder, "start", environment={"threads": 2})
    for number, value in enumerate(others, 1):
        figures = {} if value is None else {"cpu/other_cores": value, "cpu/cores": 4}
        record = {"step": number, "elapsed_s": 2.0 * number, "perf/step_ms": 2e3}
        append_line(folder / layout.METRICS, record | figures)


def test_recorded_windows_say_how_busy_the_machine_was(tmp_path):
    record_run(tmp_path / "busy", [0.1, 3.0, None, 3.6, 0.2])  # the fourth is of 4 s, others of 2 s
    busy = recorded_evidence(tmp_path / "busy").host
    assert (busy.cores, busy.threads, busy.busy_share) == (4, 2, 0.6)
    assert busy.other_busy_cores == pytest.approx((3.0 * 2 + 3.6 * 4) / 6)
    found = diagnosis_of(STEPS.model_copy(update={"device": "cpu", "host": busy}))
    assert "3.4 of 4 cores busy for 60% of the run" in found.verdict
    record_run(tmp_path / "idle", [0.1, 0.3])
    idle = recorded_evidence(tmp_path / "idle").host
    assert (idle.other_busy_cores, idle.cores) == (pytest.approx(0.2), None)
    record_run(tmp_path / "short", [None, None])
    assert recorded_evidence(tmp_path / "short").host == HostFacts()


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
        found = Finding(verdict="Slow.", fixes=fixes)
        with_rules(Rule(lambda _, found=found: found, "slow"))
        (ranked,) = diagnosis_of(STEPS.model_copy(update={"remaining_s": remaining_s})).findings
        assert [fix.text for fix in ranked.fixes] == [fix.text for fix in order]


def test_findings_json_is_strict_json_with_a_format_version(with_rules, tmp_path):
    with_rules(rule("a", share=0.2))
    path = diagnosis_of(STEPS).write(tmp_path)
    assert path == tmp_path / "findings.json"
    stored = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert stored["format_version"] == 1
    assert stored["verdict"] == "a is the cause."
    assert stored["findings"][0]["share"] == 0.2
    assert stored["roofline"]["peak_tflops"] is None
