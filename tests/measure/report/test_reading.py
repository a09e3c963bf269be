"""What a run directory says, whatever state it is in."""

from __future__ import annotations

import json
import math

import pytest

from flatout.measure.report.reading import RunReader, names_of


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_records_become_curves(make_run, read):
    (run,) = read(make_run())
    loss = run.curves["train/loss"]
    assert (loss.step[2], loss.tokens[2], loss.elapsed_s[2]) == (3, 300, 1.5)
    assert loss.value[2] == pytest.approx(4 / 3)
    assert (run.num_records, run.notes, run.state) == (20, (), "killed")
    assert run.settings["train.steps"] == 40


def test_a_curve_has_only_the_records_with_its_figure(make_run, read):
    records = [{"step": 1, "train/loss": 3.0}, {"step": 2, "val/loss": 2.5}]
    (run,) = read(make_run(records=records))
    assert list(run.curves["val/loss"].step) == [2]
    assert math.isnan(run.curves["val/loss"].tokens[0])


def test_half_a_last_line_is_left_out_and_said(make_run, read):
    folder = make_run()
    append(folder / "metrics.jsonl", '{"step": 21, "train/lo')
    (run,) = read(folder)
    assert run.num_records == 20
    (note,) = run.notes
    assert "line 21" in note
    assert "incomplete" in note


def test_a_damaged_line_in_the_middle_is_left_out_and_said(make_run, read):
    folder = make_run()
    append(folder / "metrics.jsonl", 'not json\n[1]\n{"step": 22, "train/loss": 1.0}\n')
    (run,) = read(folder)
    assert run.num_records == 21
    assert run.notes == ("metrics.jsonl has 2 damaged lines (the first is line 21), left out.",)


def test_figures_that_are_not_finite_are_gaps_and_counted(make_run, read):
    values = [1.0, math.nan, math.inf, None, 2.0, 10**400, "text", True]
    records = [{"step": step, "train/loss": value} for step, value in enumerate(values)]
    (run,) = read(make_run(records=records))
    curve = run.curves["train/loss"]
    assert [*curve.step] == [0, 1, 2, 3, 4, 5]
    assert [*map(math.isnan, curve.value)] == [False, True, True, True, False, True]
    assert run.notes == ("train/loss is not a finite number in 4 records: gaps in its curve.",)


def test_records_without_a_step_are_left_out(make_run, read):
    (run,) = read(make_run(records=[{"train/loss": 1.0}, {"step": math.nan, "train/loss": 1.0}]))
    assert run.curves == {}
    assert "2 records" in run.notes[0]


def test_no_metrics_at_all(make_run, read):
    folder = make_run(records=[])
    (folder / "metrics.jsonl").unlink()
    (run,) = read(folder)
    assert run.num_records == 0
    assert "no records yet" in run.notes[0]


def test_damaged_documents_become_notes(make_run, read):
    folder = make_run()
    for name in ("config.yaml", "summary.json", "findings.json"):
        (folder / name).write_text("{[")
    (run,) = read(folder)
    assert (run.settings, run.summary, run.findings) == ({}, {}, None)
    for name in ("config.yaml", "summary.json", "findings.json"):
        assert any(name in note for note in run.notes), name


def test_the_records_of_another_training_loop(make_run, read):
    (run,) = read(make_run(config=None))
    assert (run.state, run.settings, run.notes) == ("watched", {}, ())
    assert "train/loss" in run.curves


def test_a_reader_reads_what_is_new(make_run):
    folder = make_run()
    reader = RunReader(folder, "run")
    assert reader.read().num_records == 20
    before = reader.signature()
    append(folder / "metrics.jsonl", json.dumps({"step": 21, "train/loss": 1.0}) + '\n{"ste')
    assert reader.signature() != before
    assert reader.read().num_records == 21
    append(folder / "metrics.jsonl", 'p": 22, "train/loss": 1.0}\n')
    run = reader.read()
    assert (run.num_records, run.notes) == (22, ())
    assert run.curves["train/loss"].step[-1] == 22


def test_a_reader_starts_again_after_a_resume_replaced_the_records(make_run):
    folder = make_run()
    reader = RunReader(folder, "run")
    reader.read()
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:10]
    (folder / "new").write_text("".join(line + "\n" for line in kept))
    (folder / "new").replace(folder / "metrics.jsonl")
    assert reader.read().num_records == 10


def test_names_are_short_and_different(tmp_path):
    a, b = tmp_path / "one" / "run", tmp_path / "two" / "run"
    assert names_of([a]) == ["run"]
    assert names_of([a, b]) == ["one/run", "two/run"]
