"""The benchmark of tune: its grid is what tune can reach, and its table states the target."""

from __future__ import annotations

import pytest

from flatout.measure.experiments.space import Setting


def test_the_grid_has_every_combination_once(benchmark, tiny_config):
    config = tiny_config(batch__rows_per_device="auto", speedups="auto")
    grid = benchmark.settings_of(config)
    assert len(set(grid)) == len(grid) == 4 * 3 * 4
    assert {setting.rows for setting in grid} == {1, 2, 4, 8}
    assert sum("fused-adamw" in setting.speedups for setting in grid) == len(grid) / 2
    assert not any({"checkpointing", "selective-checkpointing"} <= s.speedups for s in grid)


def test_settings_are_described_for_people(benchmark):
    setting = Setting(1, 4, frozenset({"checkpointing", "fused-adamw", "prefetch"}))
    assert benchmark.described(setting) == "1 row, checkpointing, fused-adamw"
    assert benchmark.described(Setting(8, 4, frozenset())) == "8 rows, no checkpointing"


@pytest.mark.parametrize(("rate", "said"), [(97.5, "kept"), (96.0, "**missed**")])
def test_the_table_states_whether_the_target_is_kept(benchmark, rate, said):
    tuned = {"setting": "8 rows", "seconds": 100.0, "trials": 12}
    found = {
        "machine": "a CPU",
        "commit": "abc1234",
        "repeats": 3,
        "grid_trials": 72,
        "grid_s": 500.0,
        "best_of_grid": {"setting": "8 rows", "rates": [99.0, 100.0, 101.0]},
        "tuned": [
            tuned | {"start": "auto", "rates": [rate, rate, rate]},
            tuned | {"start": "1 row", "rates": [100.0, 100.0, 100.0]},
        ],
    }
    shown = benchmark.table(found)
    assert f"in a fifth of its time: {said}" in shown
    assert "| grid | 8 rows | 100 (99 to 101) | | 72 | 500 |" in shown
