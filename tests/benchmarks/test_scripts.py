"""The benchmark on foreign scripts: its tables are sound, and it counts what was named."""

import ast
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "benchmarks"
LOOPS = yaml.safe_load((FOLDER / "script_faults.yaml").read_text())
FAULT = {"at": ["gc.collect()"], "names": ["garbage-collection"]}


def finding(name="slow-host", line="gc.collect() (train.py)", harm="slows"):
    return {"name": name, "line": line, "harm": harm, "verdict": "It takes 30% of each step."}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.get("fault", loop.get("healthy")))
def test_a_loop_parses_and_contains_the_lines_that_it_expects(loop):
    ast.parse(loop["source"])
    assert ("fault" in loop) == ("at" in loop) != ("healthy" in loop)
    assert not [part for part in loop.get("at", ()) if part not in loop["source"]]


@pytest.mark.parametrize(
    ("found", "is_named"),
    [
        (finding(), True),
        (finding(line="loss.backward() (train.py)"), False),
        (finding("garbage-collection", line=None), True),
        (finding(harm="warns"), False),
        (finding("tiny-kernels"), False),
    ],
)
def test_a_fault_is_named_by_its_line_or_by_the_name(benchmark, found, is_named):
    assert benchmark.names(found, FAULT) == is_named


def test_the_table_counts_faults_named_first_and_later(benchmark):
    rows = [
        {"fault": f"fault {number}", "set": "first", "place": at, "findings": [finding()]}
        for number, at in enumerate([1, 1, 2, None])
    ]
    found = {"machine": "a CPU", "commit": "abc1234", "loops": rows}
    found |= {"diagnose": [], "blind": [], "tune": []}
    shown = benchmark.table(found)
    assert "Named first: 2 of 4, later: 1. Target 85%: **missed**." in shown
    assert "| fault 2 | as number 2 | slow-host `gc.collect() (train.py)` |" in shown
