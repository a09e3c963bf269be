"""What benchmarks share: turns, spreads, tables, result files."""

import sys
from pathlib import Path

import pytest

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported(load, name):
    load(name)


def test_ways_take_turns_in_alternating_order(benchmark):
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    found = benchmark.in_turns(ways, 2, warm_up=1)
    assert order == list("ba" + "ab" + "ba")
    assert found == {"a": [3, 6], "b": [4, 5]}


def test_a_table_has_its_numbers_in_cells_and_notes_below(benchmark):
    rows = [("first", "", benchmark.spread([3.0, 1.0, 2.0], 1)), ("second", 7, "")]
    assert benchmark.markdown("| a | b", rows, "A note.", "Another.") == (
        "| | a | b |\n|---|---|---|\n| first | | 2.0 (1.0 to 3.0) |\n| second | 7 | |\n\n"
        "A note.\nAnother.\n"
    )


def test_a_failed_command_ends_the_benchmark_with_its_errors(benchmark):
    assert benchmark.json_of([sys.executable, "-c", 'print("noise\\n{}")']) == {}
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        benchmark.json_of([sys.executable, "-c", "1 / 0"])
