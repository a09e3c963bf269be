"""The fraction of tokens, its interval and the picture are computed from the runs."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "optimisers_report.py"
SETTINGS = {"adamw": {"kind": "adamw", "lr": 0.004}, "muon": {"kind": "muon", "lr": 0.008}}


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("optimisers_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(kind, lr, fraction, seed, loss):
    return {"kind": kind, "lr": lr, "fraction": fraction, "seed": seed, "val_loss": loss}


def falling(first, *, adamw=2.0):
    """Return runs in which Muon's loss falls by 0.4 per doubling and AdamW ends at `adamw`.

    They include a tuning run, which must not be counted.
    """
    rows = [row("adamw", 0.004, 1.0, 7, 1.0), row("muon", 0.016, 0.5, 1, 1.0)]
    for n, seed in enumerate((1, 2, 3)):
        rows += [
            row("muon", 0.008, 0.25 * 2**k, seed, first + 0.01 * n - 0.4 * k) for k in range(3)
        ]
        rows += [
            row("adamw", 0.004, fraction, seed, adamw + (1 - fraction) + 0.01 * n)
            for fraction in (0.5, 1.0)
        ]
    return rows


def test_the_fraction_is_interpolated_per_seed(report):
    found = report.summary(falling(2.2), SETTINGS, (1, 2, 3))
    assert found["needed_by_seed"] == pytest.approx([0.25 * math.sqrt(2)] * 3)
    assert found["interval_95"] == pytest.approx((found["needed"], found["needed"]))
    assert [point["fraction"] for point in found["curves"]["adamw"]] == [0.5, 1.0]


def test_a_loss_outside_all_runs_has_no_fraction(report):
    assert report.summary(falling(1.9), SETTINGS, (1, 2, 3))["needed"] is None
    assert report.summary(falling(2.9), SETTINGS, (1, 2, 3))["needed"] is None
    assert report.crossing([(0.5, 2.0), (1.0, 2.0)], 2.0) == 0.5


def test_the_interval_uses_students_distribution(report):
    low, high = report.interval([0.4, 0.5, 0.6])
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(4.303 * 0.1 / math.sqrt(3))


def test_the_picture_has_a_point_for_every_seed(report):
    corpus = {
        "title": "a text",
        "tokens": 1_000_000,
        **report.summary(falling(2.2), SETTINGS, (1, 2, 3)),
    }
    drawn = ElementTree.fromstring(report.picture({"corpora": [corpus, corpus]}))
    assert len([element for element in drawn.iter() if element.tag.endswith("circle")]) == 2 * (
        9 + 6
    )
