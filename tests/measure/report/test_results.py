"""Results, where the time went, and what differs between runs."""

from __future__ import annotations

import re

from flatout.measure.report.results import differences, results, settings, time_of_steps


def text(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)).strip()


def test_the_summary_of_a_finished_run(make_run, read):
    summary = {"train_loss": 1.2345, "mfu": 0.3, "mfu_of": "data sheet", "peak_gib": 2.0}
    shown = text(results(read(make_run(summary=summary))))
    assert "state finished" in shown
    assert "training loss 1.2345" in shown
    assert "30.0% data sheet" in shown
    assert "2.00" in shown


def test_an_unfinished_run_shows_its_last_records(make_run, read):
    shown = text(results(read(make_run(events=[{"event": "resume", "step": 3}]))))
    assert "steps 20 of 40" in shown
    assert "training loss 0.2000" in shown
    assert "tokens/s 1,01" in shown
    assert "resumed 1" in shown


def test_what_no_run_has_is_left_out(make_run, read):
    shown = text(results(read(make_run("empty", records=[]), make_run("other", records=[]))))
    assert "state killed killed" in shown
    assert "loss" not in shown


def test_the_parts_of_a_step(make_run, read):
    assert "10 ms 8 ms (80%) 1 ms (10%) 1 ms (10%)" in text(time_of_steps(read(make_run())))
    assert time_of_steps(read(make_run("b", records=[{"step": 1, "train/loss": 1.0}]))) == ""


def test_differences_between_runs(make_run, read):
    other = "name: tiny\nmodel: {vocab_size: 65}\ndata: {path: data/x}\ntrain: {steps: 40}\n"
    page = differences(read(make_run("a"), make_run("b", config=other)))
    shown = text(page)
    assert "model.vocab_size 257 65" in shown
    assert "train.steps" not in shown
    assert "vocabularies of different sizes (257, 65)" in shown
    assert "different datasets (data/book, data/x)" in shown


def test_equal_runs_have_no_differences(make_run, read):
    assert "are the same" in differences(read(make_run("a"), make_run("b")))


def test_all_settings(make_run, read):
    assert "train.steps 40" in text(settings(read(make_run())))
    assert "no config.yaml" in settings(read(make_run("w", config=None)))
