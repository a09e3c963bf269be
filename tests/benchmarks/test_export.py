"""The benchmark of exports saves a run, exports it in processes, and prints a table."""

from __future__ import annotations

import pytest


@pytest.fixture
def benchmark(benchmark, monkeypatch):
    monkeypatch.setitem(benchmark.SHAPE, "d_model", 32)
    monkeypatch.delitem(benchmark.WAYS, "gguf, bfloat16")
    return benchmark


@pytest.mark.slow
def test_a_run_is_exported_and_measured(benchmark, tmp_path):
    data = benchmark.make_data(tmp_path / "data", 4096, shards=1)
    run = benchmark.make_run(tmp_path / "run", data, 1)
    row = benchmark.worker(run, "huggingface", tmp_path)
    assert row["seconds"] > 0
    assert row["peak_mib"] >= 0
    assert not (tmp_path / "out").exists()
    assert benchmark.copied(run, tmp_path / "copy")["seconds"] > 0


def test_the_table_has_a_row_for_each_format(benchmark):
    rows = {way: [{"seconds": 2.0, "peak_mib": 30.0}] for way in benchmark.WAYS}
    size = {"gigabytes": 1.0, "rows": rows | {"cp": [{"seconds": 1.0}]}}
    text = benchmark.table(
        {"sizes": {"5": size, "20": size}, "machine": "a machine", "commit": "abc", "repeats": 1}
    )
    assert text.startswith("| format | 1.00 GB of weights: s | MiB | 1.00 GB of weights: s | MiB |")
    assert "| safetensors | 2.00 (2.00 to 2.00) | 30 | 2.00 (2.00 to 2.00) | 30 |" in text
