"""What a run directory says, whatever state it is in. A long curve keeps its peaks and its gaps."""

import math

import numpy as np
import pytest

from flatout.measure.report.curves import INTERVALS, outline


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_records_become_curves(make_run, read):
    (run,) = read(make_run())
    loss = run.curves["train/loss"]
    assert [*loss[:, 2]] == pytest.approx([3, 300, 1.5, 4 / 3])
    assert (run.steps, run.elapsed_s) == (20, 10.0)
    assert (run.num_records, run.notes, run.state) == (20, [], "killed")
    assert run.settings["train.steps"] == 40
    records = [{"step": 1, "train/loss": 3.0}, {"step": 2, "val/loss": 2.5}]
    (run,) = read(make_run("other", records=records))
    step, tokens, elapsed_s, loss = run.curves["val/loss"][:, 0]
    assert (step, loss) == (2, 2.5)
    assert math.isnan(tokens)
    assert math.isnan(elapsed_s)
    assert run.values("absent") == []
    assert run.elapsed_s is None


def test_damaged_lines_are_omitted_and_said(make_run, read):
    lines = 'not json\n[1]\n{"step": 22, "train/loss": 1.0}\n'
    for name, text, records, note in (
        ("cut", '{"step": 21, "train/lo', 20, "The last line of metrics.jsonl (line 21) is inc"),
        ("damaged", lines, 21, "metrics.jsonl has 2 damaged lines (the first is line 21), skip"),
    ):
        folder = make_run(name)
        append(folder / "metrics.jsonl", text)
        (run,) = read(folder)
        assert run.num_records == records
        assert [note in found for found in run.notes] == [True]


def test_numbers_that_are_not_finite_are_gaps_and_counted(make_run, read):
    values = [1.0, math.nan, math.inf, None, 2.0, 10**400, "text", True]
    records = [{"step": step, "train/loss": value} for step, value in enumerate(values)]
    (run,) = read(make_run(records=records))
    curve = run.curves["train/loss"]
    assert [*curve[0]] == [0, 1, 2, 3, 4, 5]
    assert [*map(math.isnan, curve[-1])] == [False, True, True, True, False, True]
    assert run.notes == ["train/loss is not a finite number in 4 records: gaps in its curve."]


def test_records_without_a_step_are_omitted(make_run, read):
    folder = make_run(records=[{"train/loss": 1.0}, {"step": math.nan, "train/loss": 1.0}])
    (run,) = read(folder)
    assert run.curves == {}
    assert run.notes[0] == "2 records of metrics.jsonl without a step, skipped."
    (folder / "metrics.jsonl").unlink()
    (run,) = read(folder)
    assert run.num_records == 0
    assert "no records yet" in run.notes[0]


def test_a_damaged_configuration_becomes_a_note(make_run, read):
    folder = make_run()
    (folder / "config.yaml").write_text("{[")
    (run,) = read(folder)
    assert (run.settings, run.diagnosis) == ({}, None)
    assert any("config.yaml" in note for note in run.notes)


def test_the_records_of_another_training_loop(make_run, read):
    (run,) = read(make_run(config=None))
    assert (run.state, run.settings, run.notes) == ("watched", {}, [])
    assert "train/loss" in run.curves


def test_names_are_short_and_different(make_run, read):
    a, b = make_run("one/run"), make_run("two/run")
    assert [run.name for run in read(a)] == ["run"]
    assert [run.name for run in read(a, b)] == ["one/run", "two/run"]


def curve(values):
    step = np.arange(len(values), dtype=np.float64)
    return np.stack([step, 10 * step, 0.1 * step, np.asarray(values, dtype=np.float64)])


def test_a_short_curve_is_drawn_whole():
    short = curve(range(2 * INTERVALS))
    assert outline(short) is short


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    values = np.random.default_rng(0).normal(size=100_000)
    values[31_415], values[92_653] = 50.0, -50.0
    step, tokens, _, value = outline(curve(values))
    assert len(value) <= 2 * INTERVALS + 2
    assert (step[0], step[-1]) == (0, 99_999)
    assert {50.0, -50.0} <= set(value)
    assert (np.diff(step) > 0).all()
    assert (value == values[step.astype(int)]).all()
    assert (tokens == 10 * step).all()


def test_a_stretch_without_values_stays_a_gap():
    values = np.ones(10_000)
    values[4000:6000] = np.nan
    drawn = outline(curve(values))[-1]
    assert np.isnan(drawn).any()
    assert np.nanmax(drawn) == 1
