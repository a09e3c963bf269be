"""The benchmark of the loader reads its dataset, and its table marks missed targets."""

from __future__ import annotations

import pytest

from flatout.data.store.shards import Dataset


def test_the_benchmark_reads_its_own_dataset(benchmark, tmp_path):
    data = benchmark.make_data(tmp_path / "data", 4096, shards=5)
    assert len(Dataset.open(data).manifest.shards) == 6
    found = benchmark.measure(data, repeats=2, steps=4, seq_lens=(16, 64), batch_tokens=256)
    assert {seq_len: len(rows) for seq_len, rows in found["rows"].items()} == {"16": 2, "64": 2}
    assert len(found["seek_s"]) == 10
    text = benchmark.table(found | {"machine": "a machine", "commit": "abc"})
    assert "| sequences of 16 | **" in text
    assert "10,242 tokens in 6 shards" in text


@pytest.mark.parametrize(
    ("rate", "first_s", "seek_s", "verdict"),
    [
        (2e9, 0.05, 1e-4, "Every target is met."),
        (9e8, 0.05, 1e-4, "**Missed: tokens per second at 1024.**"),
        (2e9, 0.2, 2e-3, "**Missed: the first batch at 1024, seeking.**"),
    ],
)
def test_missed_targets_are_marked(benchmark, rate, first_s, seek_s, verdict):
    assert (
        benchmark.missed(
            {"rows": {"1024": [{"tokens_per_s": rate, "first_s": first_s}]}, "seek_s": [seek_s]}
        )
        == verdict
    )
