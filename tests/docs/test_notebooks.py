"""The notebooks run from the first cell to the last, and are stored with what they show."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SMALL = {"MAX_BYTES = 1_000_000": "MAX_BYTES = 100_000", "STEPS = 200": "STEPS = 10"}
"""Makes the quickstart short enough for a test."""
RUN = """
import ast, json, sys
sys.path.insert(0, sys.argv[1])
names = {}
for source in json.loads(sys.stdin.read()):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        print(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
"""


def cells_of(path: Path, kind: str) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path):
    cells = cells_of(path, "code")
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = [[one["output_type"] for one in cell["outputs"]] for cell in cells]
    assert all(len(each) <= 1 and {*each} <= {"execute_result", "stream"} for each in kinds)
    shown = json.dumps([cell["outputs"] for cell in cells])
    for part in ("tokens     1,000,047", "Memory by part", "validation loss ", "report.html"):
        assert part in shown
    assert "busy" not in shown
    ids = [cell["id"] for kind in ("code", "markdown") for cell in cells_of(path, kind)]
    assert len({*ids}) == len(ids)


def test_the_quickstart_shows_every_step():
    (path,) = NOTEBOOKS
    text = "".join("".join(cell["source"]) for cell in cells_of(path, "code"))
    for call in ("prepare", "plan", "train", "sample", "report"):
        assert f"flatout.{call}(" in text


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_in_order(path, tmp_path):
    pytest.importorskip("bokeh")
    sources = ["".join(cell["source"]) for cell in cells_of(path, "code")]
    for long, short in SMALL.items():
        assert any(long in source for source in sources)
        sources = [source.replace(long, short) for source in sources]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT)],
        input=json.dumps(sources),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "validation loss" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
