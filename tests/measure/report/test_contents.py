"""What the page says: differences, results, findings, samples, events and settings."""

from __future__ import annotations

import html
import math
import re

import pytest

from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.report import page
from flatout.measure.report.page import LONGEST_TEXT, known, setting
from flatout.measure.rules import Finding, Fix
from flatout.measure.steps.evidence import CallSite, Evidence


def results(runs):
    return {label: cells for label, *cells in page.results(runs)}


def test_numbers_and_settings():
    for value in (None, "3", True, math.nan, math.inf, 10**400, [1]):
        assert known(value, str) == "–"
    values = [None, "a", True, 1e-3, [1, "b"]]
    assert list(map(setting, values)) == ["–", "a", "true", "0.001", '[1, "b"]']
    assert len(setting("x" * 10**6)) < LONGEST_TEXT + 50


def test_the_results_are_those_of_the_summary_or_the_last_record(make_run, read):
    summary = {"train_loss": 1.2345, "mfu": 0.3, "mfu_of": "data sheet", "peak_gib": 2.0}
    shown = results(read(make_run("finished", summary=summary)))
    assert shown["state"] == ["finished"]
    assert shown["training loss"] == ["1.2345"]
    assert shown["model FLOPs utilisation"] == ["30.0% (data sheet)"]
    assert shown["peak memory"] == ["2.00 GiB"]
    shown = results(read(make_run("unfinished", events=[{"event": "resume", "step": 3}])))
    assert shown["steps"] == ["20 of 40"]
    assert shown["training loss"] == ["0.2000"]
    assert shown["tokens/s"] == ["1,011"]
    assert shown["resumed"] == ["1"]
    shown = results(read(make_run("empty", records=[]), make_run("other", records=[])))
    assert shown["state"] == ["killed", "killed"]
    assert not any("loss" in label for label in shown)


def test_the_time_in_total_is_the_summarys(make_run, read):
    assert results(read(make_run()))["time in total"] == ["10 s"]
    summary = {"wall_s": 21.0, "elapsed_s": 99.0}
    assert results(read(make_run("b", summary=summary)))["time in total"] == ["1 min 39 s"]


def test_the_parts_of_a_step(make_run, read):
    shown = results(read(make_run(), make_run("b", records=[{"step": 1, "train/loss": 1.0}])))
    labels = ("median step", "of it on the device", "of it on the host", "of it waiting for data")
    parts = [shown[label][0] for label in labels]
    assert parts == ["10 ms", "8 ms (80%)", "1 ms (10%)", "1 ms (10%)"]
    assert {shown[label][1] for label in labels} == {"–"}


def test_differences_between_runs(make_run, read):
    other = "name: tiny\nmodel: {vocab_size: 65}\ndata: {path: data/x}\ntrain: {steps: 40}\n"
    runs = read(make_run("a"), make_run("b", config=other))
    first, second, *_ = page.above(runs)
    assert [first.key, second.key] == ["differences", "results"]
    assert re.findall(">([^<>]+)</th><td>([^<>]+)</td><td>([^<>]+)<", first.body) == [
        ("model.vocab_size", "257", "65"),
        ("data.path", "data/book", "data/x"),
    ]
    vocabularies, datasets = page.comparability(runs)
    assert "vocabularies of different sizes (257, 65)" in vocabularies
    assert "different datasets (data/book, data/x)" in datasets
    equal = read(make_run("c"), make_run("d"))
    assert "The settings of these runs are the same." in next(page.above(equal)).body
    assert page.comparability(equal) == []
    assert ("train.steps", "40", "40") in page.settings(equal)
    assert page.settings(read(make_run("w", config=None))) == []


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
    shown = page.render(read(make_run("many", events=events)))
    steps = re.findall("<summary>Step ([0-9]+)<", shown)
    assert len(steps) == page.MAX_SAMPLES
    assert steps[-1] == "999"


@pytest.mark.slow
def test_many_events_are_counted(make_run, read):
    events = [{"event": "skip", "step": step} for step in range(page.MAX_EVENTS + 7)]
    shown = text_of(read(make_run(events=events)))
    assert "7 earlier events are in events.jsonl." in shown
    assert "– 506 skip" in shown
    assert "– 6 skip" not in shown
    save = {"event": "save", "step": 1_000, "wall_s": 9.0, "path": "checkpoints/step-1000"}
    shown = text_of(read(make_run("save", events=[save])))
    assert "9.0 s 1,000 save path checkpoints/step-1000" in shown
