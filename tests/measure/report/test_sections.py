"""Plan against reality, findings, samples and events."""

from __future__ import annotations

from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.diagnose.finding import Finding, Fix
from flatout.measure.report import sections
from flatout.measure.steps.evidence import CallSite, Evidence


def test_predictions_stand_beside_what_was_measured(make_run, read):
    predicted = {"peak_gib": 2.0, "wall_s": 10, "kwh": None, "parts_gib": {"weights": 0.5}}
    summary = {"predicted": predicted, "peak_gib": 2.5, "wall_s": 20.0}
    page = sections.plan(read(make_run(summary=summary)))
    assert "peak memory, GiB</th><td>2.00</td><td>2.50</td><td>0.80</td>" in page
    assert "time in total</th><td>10.0 s</td><td>20.0 s</td><td>0.50</td>" in page
    assert "parts_gib.weights</th><td>0.5</td><td>–</td><td>–</td>" in page
    assert "kwh" not in page


def test_the_time_of_a_run_that_stopped_early_is_not_compared(make_run, read):
    summary = {"predicted": {"wall_s": 10.0}, "wall_s": 5.0, "stopped_early": True}
    page = sections.plan(read(make_run(summary=summary)))
    assert "<td>10.0 s</td><td>–</td><td>–</td>" in page


def test_no_predictions_no_section(make_run, read):
    assert sections.plan(read(make_run("a"))) == ""
    assert sections.plan(read(make_run("b", summary={"predicted": "no"}))) == ""


def test_a_diagnosis_is_shown_as_it_was_written(make_run, read):
    fix = Fix(text="Raise data.prefetch.", overrides={"data.prefetch": 8})
    site = CallSite(file="mine.py", line=7, text="time.sleep(1)")
    finding = Finding(
        name="slow-data",
        verdict="Reading is slow.",
        harm="slows",
        figures={"wait_ms": 9.5, "other": None},
        share=0.25,
        site=site,
        fixes=(fix,),
    )
    folder = make_run(events=[])
    diagnosis_of(Evidence(source="recorded run")).model_copy(
        update={"verdict": "The device waits for data.", "findings": (finding,)}
    ).write(folder)
    page = sections.findings(read(folder))
    for part in (
        "<strong>The device waits for data.</strong>",
        "<h4>Reading is slow.</h4>",
        "<dd>wait_ms 9.5</dd>",
        "<dd>25%</dd>",
        "mine.py:7 <code>time.sleep(1)</code>",
        "<dd>Raise data.prefetch.</dd>",
    ):
        assert part in page, part


def test_no_findings_no_section(make_run, read):
    for number, content in enumerate((None, "x", [], {}, {"verdict": None}, {"findings": 3})):
        assert sections.findings(read(make_run(str(number), findings=content))) == ""


def test_findings_of_another_shape_are_left_out(make_run, read):
    found = {"verdict": "v", "findings": ["text", {"fixes": 3, "site": 1, "figures": []}]}
    assert sections.findings(read(make_run(findings=found))).count("<article") == 1


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
