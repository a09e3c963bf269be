"""What the page says: results, differences, plan against reality, findings, samples and events."""

from __future__ import annotations

import html
import math
import re

import pytest

from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.report import page
from flatout.measure.report.page import LONGEST_TEXT, cut, number, plain
from flatout.measure.rules import Finding, Fix
from flatout.measure.steps.evidence import CallSite, Evidence


def results(runs):
    return {label: cells for label, *cells in page.results(runs)}


def test_numbers_and_values():
    for value in (None, "3", True, math.nan, math.inf, 10**400, [1]):
        assert number(value) == number(value, "time") == "–"
    assert (number(12_345), number(0.123456), number(0.5, ".1%")) == ("12,345", "0.1235", "50.0%")
    assert (number(3.21, "time"), number(7500, "time")) == ("3.2 s", "2 h 05 min")
    values = [None, "a", True, 1e-3, [1, "b"]]
    assert list(map(plain, values)) == ["–", "a", "true", "0.001", '[1, "b"]']
    assert len(cut("x" * 10**6)) < LONGEST_TEXT + 50


def test_the_results_are_those_of_the_summary_or_the_last_record(make_run, read):
    summary = {"train_loss": 1.2345, "mfu": 0.3, "mfu_of": "data sheet", "peak_gib": 2.0}
    shown = results(read(make_run("finished", summary=summary)))
    assert shown["state"] == ["finished"]
    assert shown["training loss"] == ["1.2345"]
    assert shown["model FLOPs utilisation"] == ["30.0% (data sheet)"]
    assert shown["peak memory, GiB"] == ["2.00"]
    shown = results(read(make_run("unfinished", events=[{"event": "resume", "step": 3}])))
    assert shown["steps"] == ["20 of 40"]
    assert shown["training loss"] == ["0.2000"]
    assert shown["tokens/s"] == ["1,011"]
    assert shown["resumed"] == ["1"]
    shown = results(read(make_run("empty", records=[]), make_run("other", records=[])))
    assert shown["state"] == ["killed", "killed"]
    assert not any("loss" in label for label in shown)


def test_the_time_in_total_is_the_summarys_wherever_it_is_shown(make_run, read):
    summary = {"predicted": {"wall_s": 10.0}, "wall_s": 21.0, "elapsed_s": 21.0}
    runs = read(make_run(summary=summary))  # the last record is of 10 s
    assert results(runs)["time in total"] == ["21 s"]
    assert list(page.plan(runs)) == [("time in total", "10 s", "21 s", "0.48")]
    resumed = read(make_run("b", summary=summary | {"elapsed_s": 99.0, "resumed_from": "x"}))
    assert results(resumed)["time in total"] == ["1 min 39 s"]
    assert [row[0] for row in page.plan(resumed)] == ["time since it was resumed"]
    stopped = summary | {"stopped_early": True}
    (row,) = page.plan(read(make_run("c", summary=stopped)))
    assert row[1:] == ("10 s", "–", "–"), "not compared"


def test_the_parts_of_a_step(make_run, read):
    runs = read(make_run(), make_run("b", records=[{"step": 1, "train/loss": 1.0}]))
    (row,) = page.step_times(runs)
    assert row[1:] == ("10 ms", "8 ms (80%)", "1 ms (10%)", "1 ms (10%)")


def test_differences_between_runs(make_run, read):
    other = "name: tiny\nmodel: {vocab_size: 65}\ndata: {path: data/x}\ntrain: {steps: 40}\n"
    runs = read(make_run("a"), make_run("b", config=other))
    found = {row[0]: row[1:] for row in page.contents(runs)["differences"]}
    assert found == {"model.vocab_size": ("257", "65"), "data.path": ("data/book", "data/x")}
    vocabularies, datasets = page.comparability(runs)
    assert "vocabularies of different sizes (257, 65)" in vocabularies
    assert "different datasets (data/book, data/x)" in datasets
    equal = read(make_run("c"), make_run("d"))
    found = page.contents(equal)
    assert (found["differences"], found["comparability"]) == ([], [])
    assert ("train.steps", "40", "40") in page.settings(equal)
    assert page.settings(read(make_run("w", config=None))) == []


def test_predictions_stand_beside_what_was_measured(make_run, read):
    predicted = {"peak_gib": 2.0, "wall_s": 10, "kwh": None, "parts_gib": {"weights": 0.5}}
    summary = {"predicted": predicted, "peak_gib": 2.5, "wall_s": 20.0}
    assert list(page.plan(read(make_run(summary=summary)))) == [
        ("peak memory, GiB", "2.00", "2.50", "0.80"),
        ("time in total", "10 s", "20 s", "0.50"),
        ("parts_gib.weights", "0.5", "–", "–"),
    ]
    assert not list(page.plan(read(make_run("a"))))
    assert not list(page.plan(read(make_run("b", summary={"predicted": "no"}))))


def text_of(runs):
    """The text of the page, without markup."""
    body = page.render(runs).partition("<main>")[2].partition("<script")[0]
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", body)).split())


@pytest.mark.slow
def test_a_diagnosis_is_shown_as_it_was_written(make_run, read):
    finding = Finding(
        name="slow-data",
        verdict="Reading is slow.",
        harm="slows",
        figures={"wait_ms": 9.5, "other": None},
        share=0.25,
        site=CallSite(file="mine.py", line=7, text="time.sleep(1)"),
        fixes=(Fix(text="Raise data.prefetch.", overrides={"data.prefetch": 8}),),
    )
    folder, found = make_run(), diagnosis_of(Evidence(source="recorded run"))
    changes = {"verdict": "The device waits for data.", "findings": (finding,)}
    found.model_copy(update=changes).write(folder)
    assert (
        "Findings The device waits for data. Reading is slow. evidence wait 9.5 ms share of the "
        "step 25% where mine.py:7 time.sleep(1) what to do Raise data.prefetch. Settings"
    ) in text_of(read(folder))


def test_findings_of_another_shape_are_a_note(make_run, read):
    for name, content in enumerate(["x", [], {}, {"verdict": None}, {"findings": 3}]):
        (run,) = read(make_run(str(name), findings=content))
        assert run.diagnosis is None
        (note,) = run.notes
        assert note.startswith("findings.json is damaged, or was not written by this version")


@pytest.mark.slow
def test_samples_are_whole_and_the_last_one_open(make_run, read):
    texts = ("one", "two " * 1000)
    events = [{"event": "sample", "step": n, "text": text} for n, text in enumerate(texts, 1)]
    shown = page.render(read(make_run(events=events)))
    assert "<details><summary>Step 1</summary><pre>one</pre></details>" in shown
    assert f"<details open><summary>Step 2</summary><pre>{texts[1]}</pre>" in shown
    events = [{"event": "sample", "step": step, "text": ""} for step in range(1000)]
    steps = [event["step"] for event in page.samples(*read(make_run("many", events=events)))]
    assert len(steps) == page.MAX_SAMPLES
    assert (steps[0], steps[-1]) == (0, 999)


@pytest.mark.slow
def test_many_events_are_counted(make_run, read):
    events = [{"event": "skip", "step": step} for step in range(page.MAX_EVENTS + 7)]
    shown = text_of(read(make_run(events=events)))
    assert "7 earlier events are in events.jsonl." in shown
    assert "step 506: skip" in shown
    assert "step 6: skip" not in shown
