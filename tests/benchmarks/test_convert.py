"""Every key that is listed for another tool is answered, and the stored counts are current."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_key_of_every_tool_is_answered(benchmark):
    for listed in benchmark.read_document(benchmark.KEYS).values():
        found = benchmark.items(listed)
        assert len(found) > 30
        assert [item.key for item in found if item.outcome == "unknown"] == []
        assert [item.key for item in found if item.outcome == "missing" and not item.why] == []


def test_the_stored_counts_are_current(benchmark):
    found = benchmark.measure()
    results = ROOT / "benchmarks" / "results"
    assert json.loads((results / "convert.json").read_text(encoding="utf-8")) == found
    assert (results / "convert.md").read_text(encoding="utf-8") == benchmark.table(found)
