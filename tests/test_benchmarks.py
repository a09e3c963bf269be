"""Figures in the documentation are those that a benchmark wrote to benchmarks/results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
LINK = r"\(\.\./benchmarks/results/(\w+\.md)\)"
ROWS = re.findall(rf"^\| (.+) \| .+, (\w+) \| \[.+\]{LINK} \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("row", "commit", "name"), ROWS, ids=lambda value: value[:24])
def test_the_figures_of_a_row_are_in_its_result(row, commit, name):
    measured = (RESULTS / name).read_text(encoding="utf-8")
    figures = [*re.findall(r"\d[\d.,]*%|\d+\.\d+|\d{1,3}(?:,\d{3})+", row), commit]
    figures += re.findall(r"(?<![\d.,])(\d+)(?= ms| of \d| tokens/s)", row)
    assert len(figures) > 1
    assert [
        one for one in figures if not re.search(rf"(?<![\d.,]){re.escape(one)}(?!\d)", measured)
    ] == []


def test_the_page_has_ten_results_and_links_all_others():
    assert len(ROWS) == 10
    assert {*re.findall(LINK, PAGE)} == {path.name for path in RESULTS.glob("*.md")}


def test_rates_on_a_gpu_were_measured():
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    rates = re.findall(r"(?<=\| )[\d,.]+(?= (?:GiB )?\|)", "\n".join(rows))
    assert len(rates) == 12
    measured = (RESULTS / "gpu.md").read_text(encoding="utf-8")
    assert [one for one in rates if f"| {one} |" not in measured] == []
