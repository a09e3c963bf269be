"""The benchmark of chat templates in a process with limits."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("family", ["chatml", "qwen 3", "llama 2", "marked"])
def test_both_ways_render_the_same_texts(benchmark, family):
    rows = benchmark.conversations(5)
    row = benchmark.measure(family, benchmark.FAMILIES[family], rows, rounds=1)
    assert min(row["here_us"], row["there_us"]) > 0
