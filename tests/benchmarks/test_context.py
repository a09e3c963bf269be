"""The benchmark of shared rows counts what ranks send, and finds the longest row."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_ranks_send_the_bytes_that_models_state(benchmark, kind):
    counted, predicted = benchmark.step(kind, 2048, 2)
    assert counted == predicted > 0


def test_the_longest_row_is_a_power_of_two_or_half_more(benchmark, monkeypatch):
    for most in (4096, 5000, 6144, 70_000):
        monkeypatch.setattr(benchmark, "step", lambda _, tokens, *__, most=most: tokens <= most)
        assert most * 2 / 3 < benchmark.longest("transformer", 1, 1.0) <= most
