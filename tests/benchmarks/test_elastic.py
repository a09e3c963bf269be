"""Runs under torchrun continue by themselves when a process or a machine is lost."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.faults
def test_runs_that_lose_a_process_or_a_machine_end_with_the_same_losses(benchmark, tmp_path):
    found = benchmark.measure(tmp_path, 2, 300, ("process", "machine lost"))
    process, machine = found["tries"]
    assert process["is_complete"]
    assert machine["is_complete"]
    assert process["error"] == 0.0, "the number of processes stays"
    assert machine["error"] < 1e-4, "fewer processes add in a different order"


def test_the_table_counts_runs_that_end(benchmark):
    one = {"kind": "process", "sizes": [4, 4], "error": 0.0, "seconds": 50.0, "is_complete": True}
    other = one | {"is_complete": False, "error": 0.5, "sizes": [4]}
    found = {"tries": [one, other], "undisturbed": {"seconds": 30.0}, "steps": 9}
    text = benchmark.table(found | {"machine": "a CPU", "commit": ""})
    assert "| process | 1 of 2 | 4; 4 → 4 | 0.5 |" in text
    assert "1 of 2 runs of 9 steps end at their last step" in text
