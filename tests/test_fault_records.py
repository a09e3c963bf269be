"""The table of faults counts the tries of all tests, and names faults and tests that exist."""

import json

from fault_records import FAULTS, RESULTS, ROOT, table


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
