"""The benchmark of `flatout plan` compares predictions with real steps and real runs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_there_are_at_least_twelve_cases(benchmark):
    names = [case.name for case in benchmark.CASES]
    assert len(set(names)) == len(names) >= 12


@pytest.mark.parametrize("speedups", ["EAGER", "PLAIN"])
def test_the_estimate_is_the_allocators_peak(benchmark, tiny_set, speedups):
    overrides = benchmark.shape(2, 128, 2, 128, getattr(benchmark, speedups))
    found = benchmark.memory_of(benchmark.Case("tiny", overrides, 16), tiny_set)
    assert abs(found["memory_error"]) < 0.05


def test_the_table_states_errors_and_verdicts(benchmark):
    row = {
        "name": "some",
        "rows": 8,
        "overrides": ["data.seq_len=64"],
        "predicted_mib": 110.0,
        "allocated_mib": 100.0,
        "memory_error": 0.1,
        "predicted_s": 8.0,
        "wall_s": 10.0,
        "time_error": -0.2,
    }
    found = {"rows": [row], "machine": "", "torch": "", "commit": "", "seconds": 15.0}
    text = benchmark.table(found)
    assert "| some | 8 x 64 | 110.0 | 100.0 | +10.0% | 8.0 | 10.0 | -20.0% |" in text
    assert "within 10% in 1 of 1 cases, kept" in text
    assert "within 15% in 0 of 1 cases, **missed**" in text
