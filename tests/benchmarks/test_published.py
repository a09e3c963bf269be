"""The benchmark of published runs predicts each of them."""

from __future__ import annotations

import statistics


def test_nine_of_ten_published_rates_are_predicted_within_a_fifth(benchmark):
    errors = [abs(row["error"]) for row in benchmark.measured()]
    assert sum(error <= benchmark.TARGET for error in errors) > 0.9 * len(errors) > 100
    assert statistics.median(errors) < 0.1
