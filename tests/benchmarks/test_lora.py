"""The benchmark of LoRA measures memory, time and checkpoints of real runs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_adapters_need_less_memory_and_smaller_checkpoints(
    benchmark, monkeypatch, tiny_set, tmp_path
):
    small = ("model.num_layers=2", "model.d_model=64", "model.num_heads=2", "data.seq_len=32")
    monkeypatch.setattr(benchmark, "MODEL", small)
    cases = {"all": (), "LoRA": ("lora.rank=2",)}
    whole, lora = benchmark.measure(tiny_set, tmp_path, cases, 1)["rows"]
    assert lora["trained"] < lora["parameters"] / 10 < whole["trained"]
    assert lora["allocated_mib"] < whole["allocated_mib"]
    assert lora["checkpoint_mib"] < whole["checkpoint_mib"]
    assert lora["predicted_mib"] < whole["predicted_mib"]


def test_the_table_compares_with_training_all_weights(benchmark):
    row = {
        "name": "all weights",
        "parameters": 1000,
        "trained": 1000,
        "allocated_mib": 400.0,
        "predicted_mib": 410.0,
        "step_ms": [20.0, 30.0],
        "checkpoint_mib": 12.0,
    }
    lora = {**row, "name": "LoRA", "trained": 10, "allocated_mib": 100.0, "step_ms": [10.0, 15.0]}
    found = {"rows": [row, lora], "machine": "", "torch": "", "commit": ""}
    text = benchmark.table({**found, "tokens": 64})
    assert "| LoRA | 10 | 100 | 410 | 25% | 12 (10 to 15) | 50% | 12.0 |" in text
