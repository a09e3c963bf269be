"""Tables in the documentation equal the ones that a benchmark wrote.

`python -m pytest tests/test_benchmarks.py --write-tables` copies them from benchmarks/results.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
END = "<!-- end of figures -->\n"
MARKED = [
    (path, name)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for name in re.findall(r"<!-- figures: (\S+) -->", path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("path", "name"), MARKED, ids=lambda value: getattr(value, "name", value))
def test_a_marked_table_equals_the_measured_one(path, name, is_current):
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- figures: {name} -->\n")
    _, end, after = rest.partition(END)
    assert end, f"{path.name}: {END.strip()} is missing after the table of {name}"
    wanted = f"{before}{begin}{(ROOT / name).read_text(encoding='utf-8')}{end}{after}"
    is_current(path, wanted)


def test_the_documentation_has_marked_tables():
    assert len({name for _, name in MARKED}) > 20


def test_ways_of_preparing_are_compared_per_repeat(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("prepare")
    ours, theirs = [2.0, 1.0], [8.0, 9.0]
    rows = {way: [] for way in benchmark.WAYS}
    rows[benchmark.OURS] = [
        {"seconds": seconds, "tokens": 10**7, "peak_mb": 1.0} for seconds in ours
    ]
    rows[benchmark.NANOGPT] = [
        {"seconds": seconds, "tokens": 10**7, "peak_mb": 1.0} for seconds in theirs
    ]
    found = {
        "rows": rows,
        "missing": {},
        "corpus_bytes": 10**8,
        "workers": 2,
        "copies": 1,
        "machine": "",
        "repeats": 2,
        "commit": "",
        "loaders": {},
    }
    assert benchmark.ratios(found, benchmark.OURS, benchmark.NANOGPT) == [4.0, 9.0]
    assert "6.5 (4.0 to 9.0) times; target: 5: kept" in benchmark.table(found)
    assert "7.5 M tokens/s; target: 18: **missed**" in benchmark.table(found)
    rows[benchmark.NANOGPT][0]["tokens"] += 1
    with pytest.raises(SystemExit, match="different numbers of tokens"):
        benchmark.table(found)
