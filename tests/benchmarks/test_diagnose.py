"""The table of planted faults counts a trial as right only when its fault is named first."""


def row(fault, strength, *findings):
    return {"fault": fault, "strength": strength, "findings": list(findings)}


def found(*rows):
    return {
        "rows": list(rows),
        "traceml": {"missing": "TraceML is not installed."},
        "planned": 7,
        "left_out": [],
        "steps": 70,
        "machine": "a CPU",
        "device": "cpu",
        "commit": "",
    }


def test_a_trial_is_right_when_its_fault_is_named_first(benchmark):
    table = benchmark.table(
        found(
            row("slow save", 1, "slow-save", "busy-machine"),
            row("slow save", 2, "slow-data", "slow-save"),
            row("slow save", 3),
            {"fault": "slow save", "strength": 3, "error": "it failed"},
            row("healthy", 1),
            row("healthy", 1, "busy-machine"),
        )
    )
    assert "| slow save | slow-save | 1 of 1 | 0 of 1 | 0 of 2 |" in table
    assert "| healthy | nothing | 1 of 2 | | | busy-machine (1) |" in table
    assert "25.0% of 4 trials, and nothing in 1 of 2 healthy ones" in table
    assert "**missed**" in table


def test_every_fault_has_a_finding(benchmark):
    from flatout.measure.rules import rules

    names = {rule.name for rule in rules()}
    assert {*benchmark.EXPECTED.values()} <= names
