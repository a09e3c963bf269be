"""The benchmark of checkpoints measures saves, and requires equal weights from both ways."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("checkpoints")


@pytest.mark.slow
def test_the_saves_of_both_ways_are_counted(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPE", {"num_layers": 1, "d_model": 16, "num_heads": 2})
    found = benchmark.measure(tmp_path, repeats=1, saves=2, every=2, device="cpu")
    for (row,) in found["rows"].values():
        assert len(row["blocked_ms"]) == len(row["seconds"]) == 2
        assert row["parameters"] > 0 < row["gigabytes"]
    found |= {"machine": "a machine", "threads": 1, "commit": "abc"}
    text = benchmark.table(found)
    assert (
        found["rows"]["beside training"][0]["reserve_ms"]
        >= 0
        == found["rows"]["in the loop"][0]["reserve_ms"]
    )
    assert "| beside training | " in text
    found["rows"]["in the loop"][0]["weights_sha256"] = "other"
    with pytest.raises(SystemExit, match="same weights"):
        benchmark.table(found)


def test_the_ratio_is_computed_per_repeat(benchmark):
    def row(blocked_ms):
        times = {
            "blocked_ms": [9e9, blocked_ms],
            "seconds": [9e9, 1.0],
            "reserve_ms": 0.0,
            "wall_s": 5.0,
        }
        return times | {"parameters": 10**6, "gigabytes": 0.01, "weights_sha256": "a"}

    rows = {"in the loop": [row(1000.0), row(100.0)], "beside training": [row(100.0), row(30.0)]}
    text = benchmark.table(
        {
            "rows": rows,
            "repeats": 2,
            "saves": 1,
            "every": 2,
            "device": "cpu",
            "machine": "",
            "threads": 1,
            "commit": "",
        }
    )
    assert "Blocked by 80.0 (70.0 to 90.0)% less." in text
