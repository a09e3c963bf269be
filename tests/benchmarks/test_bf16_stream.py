"""Both runs of a seed see the same batches, and the table shows the difference of their losses."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from flatout import Dataset


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("bf16_stream")


@pytest.fixture
def toy(benchmark):
    tiny = {"num_layers": 1, "d_model": 16, "seq_len": 16, "tokens_per_step": 64, "steps": 3}
    return [
        replace(case, **tiny, shape={**case.shape, "model.num_heads": 2})
        for case in benchmark.CASES
    ]


@pytest.mark.slow
def test_every_model_is_run_with_and_without_the_speedup_for_three_seeds(
    benchmark, toy, monkeypatch, tiny_set, tmp_path
):
    monkeypatch.setattr(benchmark, "code_state", lambda: "1a2b3c4")
    dataset, cache = Dataset.open(tiny_set), tmp_path / "runs.jsonl"
    cases = [benchmark.measure(case, dataset, range(1, 4), cache) for case in toy]
    for case in cases:
        assert [(run["seed"], run["way"]) for run in case["runs"]] == [
            (seed, way) for seed in (1, 2, 3) for way in ("bf16", "bf16-stream")
        ]
        assert 0 < case["first_steps_apart"] < 0.02
        assert case["difference"]["low"] <= case["difference"]["mean"] <= case["difference"]["high"]
        assert abs(case["difference"]["mean"]) < 0.02
    text = benchmark.table({"machine": "a machine", "commit": "abc", "torch": "2", "cases": cases})
    assert all(f"| {case.name}, 1 layers, d 16 |" in text for case in toy)
    assert f"{cases[0]['runs'][0]['val_loss']:.4f}" in text
    monkeypatch.setattr(benchmark, "trained", lambda *_: pytest.fail("the run was repeated"))
    assert benchmark.measure(toy[0], dataset, range(1, 4), cache) == cases[0]


def test_two_runs_of_a_seed_differ_only_in_the_speedup(benchmark, tiny_set):
    dataset = Dataset.open(tiny_set)
    for case in benchmark.CASES:
        without, with_stream = (
            benchmark.configured(case, dataset, way, 1).to_dict() for way in benchmark.SPEEDUPS
        )
        assert with_stream.pop("speedups") == f"{without.pop('speedups')},+bf16-stream"
        assert without == with_stream
