"""Alarms: one per change that stays, with its step, and silence on a healthy run."""

import math
import random
from pathlib import Path

import pytest

from flatout.training.metrics.alarms import Alarms

EVERY = 10
"""Steps per record."""


def watched(change=lambda i, record: None, *, count=300, every_s=2.5, noise=random.Random.gauss):
    """The events of a run with 2% noise. `change` edits its records."""
    rng, alarms = random.Random(7), Alarms(Path("runs/a b"))
    found = []
    for i in range(1, count + 1):
        record = {"step": i * EVERY, "wall_s": i * every_s, "train/lr": 1e-3}
        record["perf/tokens_per_s"] = 1e4 * (1 + 0.02 * noise(rng, 0, 1))
        record["train/loss"] = 3 + 0.02 * noise(rng, 0, 1)
        record |= {"mem/process_gib": 1.0, "mem/allocated_gib": 20.0}
        change(i, record)
        found += alarms.see(record)
    return found


def kinds(events):
    return [(event["event"], event["kind"]) for event in events]


def heavy_tailed(rng, _mean, _deviation):
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


def with_outliers(rng, _mean, _deviation):
    return rng.gauss(0, 1) + (rng.choice((-20, 20)) if rng.random() < 0.05 else 0)


@pytest.mark.parametrize("noise", [random.Random.gauss, heavy_tailed, with_outliers])
def test_a_healthy_run_has_no_alarm(noise):
    assert watched(count=2000, noise=noise) == []


def between(metric, factor):
    def change(i, record):
        if 100 <= i < 200:
            record[metric] *= factor

    return change


@pytest.mark.parametrize(
    ("metric", "factor", "kind", "text"),
    [
        ("perf/tokens_per_s", 0.8, "throughput", "Throughput went from 10,0"),
        ("train/loss", 1.2, "loss", "The training loss went from 3."),
        (
            "mem/process_gib",
            1.2,
            "host_memory",
            "The memory of this process went from 1.00 GiB to 1.20 GiB",
        ),
        (
            "mem/allocated_gib",
            1.2,
            "memory",
            "The GPU memory of this run went from 20.00 GiB to 24.00 GiB",
        ),
    ],
)
def test_a_change_that_stays_is_one_alarm_with_its_beginning_and_its_end(
    metric, factor, kind, text
):
    begun, ended = watched(between(metric, factor))
    assert kinds([begun, ended]) == [("alarm", kind), ("alarm_over", kind)]
    assert begun["since_step"] == ended["since_step"] == 1000
    assert 1050 <= begun["step"] <= 1070
    assert 2050 <= ended["step"] <= 2070
    assert begun["now"] == pytest.approx(factor * begun["usual"], rel=0.03)
    assert begun["text"].startswith(text)
    assert begun["text"].endswith("at step 1,000. `flatout diagnose 'runs/a b'` finds the cause.")
    assert "is back at" in ended["text"]


def test_what_gets_better_or_lasts_for_a_moment_is_no_alarm():
    def better(i, record):
        record["train/loss"] *= 0.999**i
        if i >= 100:
            record["perf/tokens_per_s"] *= 1.3

    def brief(i, record):
        if i % 50 < 5:
            record["perf/tokens_per_s"] *= 0.5
            record["train/loss"] *= 2

    assert watched(better) == watched(brief) == []


def test_memory_that_grows_slowly_is_an_alarm():
    def change(i, record):
        record["mem/process_gib"] += 0.002 * max(i - 100, 0)

    (begun,) = watched(change)
    assert begun["kind"] == "host_memory"
    assert begun["usual"] == pytest.approx(1.0, rel=0.1)


def test_the_first_records_may_be_slow_and_memory_may_grow_in_them():
    def change(i, record):
        if i < 20:
            record["perf/tokens_per_s"] *= 2
            record["mem/process_gib"] = 0.5

    assert watched(change) == []


def test_records_of_a_few_milliseconds_raise_no_alarm_for_seconds_of_trouble():
    def change(i, record):
        if 10_000 <= i < 10_300:
            record["perf/tokens_per_s"] /= 2

    assert watched(change, count=20_000, every_s=0.01) == []


def test_evaluations_and_records_without_numbers_are_ignored():
    alarms = Alarms(Path("run"))
    assert alarms.see({"step": 1, "val/loss": 3.0, "wall_s": 100.0}) == []
    assert alarms.see({"step": 2}) == []
