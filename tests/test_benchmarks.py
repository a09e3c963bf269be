"""Tables in the documentation equal the ones that a benchmark wrote.

`python -m pytest tests/test_benchmarks.py --write-tables` copies them from benchmarks/results.
"""

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
