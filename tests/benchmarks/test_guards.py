"""The benchmark of the guards leaves them out, and times their calls."""

from __future__ import annotations

import pytest

from flatout.cli.commands.prepare import prepare

pytestmark = pytest.mark.slow


def test_every_guard_is_timed_and_omitted(benchmark, tmp_path):
    prepare(["synthetic:documents=2000,words=300,seed=0"], out=tmp_path / "data", tokenizer="byte")
    found = benchmark.measure(tmp_path / "data", 0.0, 20)
    assert len(found["pairs"]) == 1
    assert all(seconds > 0 for pair in found["pairs"] for seconds in pair)
    assert len(found["call_s"]) == 5
    assert all(len(calls) == benchmark.REPEATS for calls in found["call_s"].values())
    made_up = found | {
        "pairs": [[1.001, 1.0]] * 60,
        "noise": [[1.0, 1.0]] * 20,
        "call_s": {name: [1e-5] for name in found["call_s"]},
    }
    table = benchmark.table(made_up)
    assert "| all | 40.0 | **0.004%**; goal 0.5%: kept |" in table, "spikes include the first row"
    assert "+0.10% (+0.10 to +0.10%)" in table
    assert "goal 0.5%: kept. A step" in table
    slow = made_up | {"pairs": [[1.02, 1.0]] * 60, "call_s": {"a": [1e-2], "b": [1e-2]}}
    assert benchmark.table(slow).count("missed") == 2
