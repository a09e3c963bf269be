"""The table of faults counts the tries of all tests, and names faults and tests that exist."""

from __future__ import annotations

import json

import fault_records
import pytest
from fault_records import FAULTS, RESULTS, ROOT, record, table


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_records, "measured", lambda: {"machine": "a PC", "commit": "abc"})
    return tmp_path / "results" / "faults.json"


def test_cases_of_a_fault_are_added_up_and_replaced(results):
    record("kill", "test_a[1]", 50, 50, results=results)
    record("kill", "test_a[2]", 1_000, 999, results=results)
    record("power", "test_b", 7, 7, results=results)
    record("kill", "test_a[1]", 60, 60, results=results)
    text = results.with_suffix(".md").read_text()
    assert f"| {FAULTS['kill']} | 1,060 | 1,059 |" in text
    assert text.index(FAULTS["kill"]) < text.index(FAULTS["power"])
    assert FAULTS["call"] not in text
    assert "a PC; commit abc; `make test-faults" in text


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_only_tests_of_faults_write_the_table(writes, marked, survived, request, monkeypatch):
    kept = []
    monkeypatch.setattr(fault_records, "record", lambda *counts: kept.append(counts))
    monkeypatch.setattr(request.config.option, "write_tables", writes)
    if marked:
        request.node.add_marker("faults")
    survived("kill", 3, [])
    assert len(kept) == (writes and marked)


def test_a_problem_fails_the_test_and_is_counted(survived, request, monkeypatch):
    kept = []
    monkeypatch.setattr(fault_records, "record", lambda *counts: kept.append(counts))
    monkeypatch.setattr(request.config.option, "write_tables", True)
    request.node.add_marker("faults")
    with pytest.raises(AssertionError, match="lost"):
        survived("kill", 3, ["lost"])
    assert kept[0][2:] == (3, 2)


def test_the_stored_table_follows_from_the_stored_counts():
    found = json.loads(RESULTS.read_text())
    assert RESULTS.with_suffix(".md").read_text() == table(found)
    assert found["faults"].keys() <= FAULTS.keys()


def test_every_stored_case_has_a_test():
    cases = [case for found in json.loads(RESULTS.read_text())["faults"].values() for case in found]
    for case in cases:
        file, _, name = case.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert f"def {name.partition('[')[0]}(" in text, case
