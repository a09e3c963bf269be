"""The benchmark of the report writes runs that a report reads, and its table states the target."""

from __future__ import annotations

import pytest

from flatout.measure.report.curves import RunData


def test_a_made_up_run_can_be_read(benchmark, tmp_path):
    run = RunData(benchmark.write_run(tmp_path / "run", 200, seed=1), "run")
    assert (run.num_records, run.notes, len(run.events)) == (200, [], 6)
    assert run.curves["val/loss"].shape == (4, 2)
    assert run.settings["train.steps"] == 200


@pytest.mark.parametrize(
    ("seconds", "size", "said"),
    [(4.9, 5_900_000, "kept"), (5.1, 1_000_000, "**missed**"), (1.0, 6_100_000, "**missed**")],
)
def test_the_table_states_whether_the_target_is_kept(benchmark, seconds, size, said):
    rows = [
        {"runs": 1, "records": 1_000, "seconds": [9.0], "bytes": 9_000_000},
        {"runs": 1, "records": 100_000, "seconds": [seconds] * 3, "bytes": size},
    ]
    text = benchmark.table({"rows": rows, "machine": "m", "repeats": 3, "commit": "c"})
    assert f"6 MB: {said}." in text
    assert f"| 1 | 100,000 | {seconds:.1f} ({seconds:.1f} to {seconds:.1f}) |" in text


@pytest.mark.slow
def test_one_measurement(benchmark, tmp_path):
    found = benchmark.measure(tmp_path, 2, 10, repeats=1)
    assert (found["runs"], found["records"], len(found["seconds"])) == (2, 10, 1)
    assert found["bytes"] > 10**6
