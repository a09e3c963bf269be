"""A course keeps some steps of a long run: what grows in it, and which rank the others wait for."""

from __future__ import annotations

import numpy as np
import pytest

from flatout.measure.course import COLUMNS, ROWS, Course, compared, growth
from flatout.measure.evidence import CallSite, Evidence

DRAW = np.random.default_rng(0)
LINE = CallSite(file="mine.py", line=7, text="sleep()", seconds_per_step=0.02)


def step(**values):
    """Return the values of a step, 0 where none is given."""
    assert values.keys() <= {*COLUMNS}
    return [float(values.get(name, 0.0)) for name in COLUMNS]


@pytest.mark.parametrize("steps", [40, 700, 5000])
def test_a_long_run_keeps_few_steps_and_the_growth_per_step_is_that_of_all(steps):
    course = Course()
    for number in range(steps):
        course.add(*step(special=number < 5, seconds=0.1 + 0.001 * number, host=300.0))
    found = course.found()
    assert len(found["course"]) <= ROWS
    assert {*found["grows"]} == {"seconds"}
    assert found["grows"]["seconds"].per_1000 == pytest.approx(1.0, rel=0.15)
    assert found["growth_bytes"] == 0.0


def test_memory_that_grows_is_counted_in_bytes_for_each_step():
    course = Course()
    for number in range(2000):
        course.add(*step(host=500.0 + 0.25 * number, memory=100.0, workers=40 + 0.1 * number))
    found = course.found()
    assert found["growth_bytes"] == pytest.approx(0.25 * 2**20, rel=0.05)
    assert found["grows"]["workers"].per_1000 == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize(("asked", "grows"), [(0.25, True), (0.0, False)])
def test_writing_to_memory_that_was_there_before_is_no_growth(asked, grows):
    """As to a buffer of fixed size, whose pages are used once something is in them."""
    course = Course()
    for number in range(2000):
        course.add(*step(host=500.0 + 0.25 * number, asked=3000.0 + asked * number))
    assert (course.found()["growth_bytes"] > 0) is grows


TIME = np.linspace(0.0, 1.0, 300)
NOISE = DRAW.lognormal(0.0, 0.3, 300)


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        (NOISE, False),
        (NOISE * (1 + TIME), True),
        (NOISE * (1 + TIME**2), True),
        (1 + (TIME > 0.5), False),  # one jump
        (1 - np.exp(-20 * TIME), False),  # it levels off
        (1 + (TIME * 10 % 1), False),  # it is freed again and again
        (2 - TIME, False),
        (1 + 0.01 * TIME, False),  # too little
        (np.repeat([1.0, 2.0, 3.0], 100), False),  # three looks are too few
    ],
)
def test_only_steady_growth_counts(values, grows):
    assert (growth(np.asarray(values, dtype=float), 1) is not None) == grows


def rank(communication, *, steps=20, sites=None, **values):
    """Return the evidence of a rank, in whose first steps it was measured in special ways."""
    waits = np.broadcast_to(communication, steps)
    rows = [
        step(special=number < 4, seconds=0.1, communication=wait, **values)
        for number, wait in enumerate(waits)
    ]
    return Evidence(source="script", world_size=2, step_s=0.1, course=rows, sites=sites or {})


def test_the_rank_that_waits_the_least_is_the_slowest_and_its_line_is_named():
    fast = rank(0.04, other=0.01, size=128.0)
    slow = rank(0.01, other=0.05, size=384.0, sites={"own": (LINE,)})
    found = compared({0: fast, 1: slow})
    assert (found.slowest, found.slowest_phase, found.site("rank")) == (1, "other", LINE)
    assert found.transfer_s == pytest.approx(0.01)
    assert found.waiting_s == pytest.approx(0.015)
    assert found.slowest_size == pytest.approx(3.0)
    assert found.machine_lines == (("Ranks", "own work of a step: 0: 60 ms, 1: 90 ms"),)


def test_ranks_that_are_slow_in_turns_wait_for_each_other():
    turns = np.arange(20) % 2 * 0.04
    found = compared({0: rank(turns), 1: rank(0.04 - turns)})
    assert found.waiting_s == pytest.approx(0.02)
    assert found.transfer_s == pytest.approx(0.0)


@pytest.mark.parametrize(
    "ranks",
    [
        {0: rank(0.04)},
        {0: rank(0.0), 1: rank(0.0)},
        {0: rank(0.04), 1: rank(0.01, steps=6)},
        {0: rank(0.04), 1: rank(0.01).model_copy(update={"course": []})},
    ],
)
def test_ranks_without_waits_or_steps_in_which_all_were_ordinary_are_not_compared(ranks):
    assert compared(ranks) == ranks[0]


def test_on_a_gpu_the_kernels_show_the_waits():
    facts = {"device": "cuda:0"}
    fast = rank(0.0).model_copy(update=facts | {"communication_s": 0.03})
    slow = rank(0.0).model_copy(update=facts | {"communication_s": 0.01})
    found = compared({0: fast, 1: slow})
    assert (found.slowest, found.transfer_s) == (1, pytest.approx(0.01))
