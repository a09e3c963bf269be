"""Events stand on the axis of the charts."""

from __future__ import annotations

from flatout.measure.report.charts import LONGEST_LINE, MAX_MARKS, described, marks_of


def test_events_stand_where_the_records_say(make_run, read):
    events = [
        {"event": "start", "step": 0},
        {"event": "save", "step": 5, "path": "checkpoints/step-5"},
        {"event": "speedup", "step": 0, "name": "compile"},
        {"event": "alarm", "step": 15, "cause": "another process"},
    ]
    marks = {mark.kind: mark for mark in marks_of(read(make_run(events=events)))}
    assert [*marks] == ["start", "save", "alarm"]
    assert (marks["save"].at.tokens[0], marks["save"].at.elapsed_s[0]) == (500, 2.5)
    assert marks["save"].texts == ("step 5: save: path checkpoints/step-5",)
    assert marks["alarm"].texts == ("step 15: alarm: another process",)


def test_events_of_several_runs_say_whose_they_are(make_run, read):
    events = [{"event": "stop", "step": 3}]
    marks = marks_of(read(make_run("a", events=events), make_run("b", events=events)))
    assert [(mark.color, mark.texts[0]) for mark in marks] == [
        (0, "a: step 3: stop"),
        (1, "b: step 3: stop"),
    ]
    assert marks[0].offset == -marks[1].offset > 0


def test_events_that_cannot_be_placed_are_not_drawn_and_thousands_thinned(make_run, read):
    events = [{"event": "save"}, {"event": "save", "step": "x"}, {"event": ["save"], "step": 1}]
    events += [{"event": "skip", "step": step} for step in range(5000)]
    (marks,) = marks_of(read(make_run(events=events)))
    assert len(marks.texts) == len(marks.at.step) <= MAX_MARKS


def test_a_description_is_one_short_line():
    event = {"event": "sample", "step": 1_000, "text": "\nfirst\nsecond"}
    assert described(event) == "step 1,000: sample: first"
    assert len(described({"event": "skip", "reason": "x" * 1000})) == LONGEST_LINE
    assert described({"event": "end", "run": "x", "step": 4}) == "step 4: end"
