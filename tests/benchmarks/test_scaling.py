"""The benchmark of several processes compares each way with one process."""

from __future__ import annotations


def test_the_table_has_rates_shares_and_errors(benchmark):
    rows = {
        "1 process": [{"tokens_per_s": 100.0, "losses": [2.0, 1.0]}],
        "2, copies": [{"tokens_per_s": 50.0, "losses": [2.0, 1.01]}],
    }
    found = {"rows": rows, "shares": {"2, copies": 0.25}, "steps": 2, "machine": "", "commit": ""}
    line = "| 2, copies | 50 (50 to 50) | 0.50 (0.50 to 0.50) | 25% | 0.01 |"
    assert line in benchmark.table(found)
