"""Plan against reality, findings, samples and events."""

from __future__ import annotations

from flatout.measure.report import sections


def test_predictions_stand_beside_what_was_measured(make_run, read):
    summary = {"predicted": {"peak_gib": 2.0, "wall_s": 10, "kwh": None}, "peak_gib": 2.2}
    page = sections.plan(read(make_run(summary=summary)))
    assert "<td>2</td><td>2.2</td><td>1.10</td>" in page
    assert "kwh" not in page
    assert "<td>10</td><td>–</td><td>–</td>" in page


def test_no_predictions_no_section(make_run, read):
    assert sections.plan(read(make_run("a"))) == ""
    assert sections.plan(read(make_run("b", summary={"predicted": "no"}))) == ""


def test_findings_are_shown_with_their_evidence(make_run, read):
    found = {
        "verdict": "The device waits for data.",
        "findings": [
            {"name": "slow-data", "verdict": "Reading is slow.", "evidence": {"wait_ms": 9.5}},
            "not a finding",
        ],
    }
    page = sections.findings(read(make_run(findings=found)))
    assert "The device waits for data." in page
    assert "<h4>Reading is slow.</h4>" in page
    assert "wait_ms: 9.5" in page


def test_no_findings_no_section(make_run, read):
    assert sections.findings(read(make_run("a"))) == ""
    assert sections.findings(read(make_run("b", findings="x"))) == ""
    assert sections.findings(read(make_run("c", findings=[]))) == ""


def test_samples_are_whole_and_the_last_one_open(make_run, read):
    events = [
        {"event": "sample", "step": 1, "text": "one"},
        {"event": "sample", "step": 2, "text": "two " * 1000},
    ]
    page = sections.samples(read(make_run(events=events)))
    assert "<details><summary>Step 1</summary><pre>one</pre>" in page
    assert f"<details open><summary>Step 2</summary><pre>{'two ' * 1000}</pre>" in page


def test_the_first_and_the_last_of_many_samples(make_run, read):
    events = [{"event": "sample", "step": step, "text": ""} for step in range(1000)]
    page = sections.samples(read(make_run(events=events)))
    assert page.count("<details") == sections.MAX_SAMPLES
    assert "Step 0<" in page
    assert "Step 999<" in page


def test_many_events_are_counted(make_run, read):
    events = [{"event": "skip", "step": step} for step in range(sections.MAX_EVENTS + 7)]
    page = sections.events(read(make_run(events=events)))
    assert page.startswith("<p>7 earlier events")
    assert "step 506: skip" in page
