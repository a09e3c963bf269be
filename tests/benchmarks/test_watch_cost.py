"""The benchmark of the cost of watching decides only when its interval does."""

from __future__ import annotations

import pytest


def found(*watched_s):
    return {
        "pairs": [[seconds, 1.0] for seconds in watched_s],
        "noise": [[1.0, 1.0]],
        "first": [10.0],
        "alone": [{"hooks_s": 2e-5, "sample_s": 3e-4}],
        "steps": 10,
        "device": "cpu",
        "machine": "a CPU",
        "commit": "",
    }


@pytest.mark.parametrize(
    ("watched", "verdict"),
    [
        ((1.001, 1.002, 1.003) * 20, "kept"),
        ((1.02, 1.03, 1.04) * 20, "missed"),
        ((0.98, 1.04) * 30, "not decided"),
        ((1.001,), "not decided"),
    ],
)
def test_the_verdict_takes_the_whole_interval(benchmark, watched, verdict):
    table = benchmark.table(found(*watched))
    assert f"**{verdict}**" in table
    assert "5.00 (5.00 to 5.00) s more, once" in table
    assert "takes 20 (20 to 20) us, and a sample 0.30 (0.30 to 0.30) ms" in table


def test_the_median_lies_in_its_interval(benchmark):
    middle, low, high = benchmark.median_with_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert middle == 3.0
    assert 1.0 <= low <= middle <= high <= 100.0
