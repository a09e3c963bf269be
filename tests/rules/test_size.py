"""Limits: lines of a file and of a function, code tokens of a room, frames down to `backward`."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import flatout

FILE_LINES, FUNCTION_LINES = 700, 80
FRAMES = 9
ROOMS = {
    "measure": 107_657,
    "data": 59_728,
    "training": 55_604,
    "cli": 24_089,
    "models": 23_147,
    "assembly": 17_424,
    "config": 10_803,
    "ops": 14_026,
    "inference": 8_308,
    "storage": 11_608,
    "distributed": 8_340,
    "optim": 5_850,
    "speedups": 4_041,
    "hardware": 3_385,
    "top": 4_308,
}
"""The most code tokens of each folder of flatout, and of the files beside them, `top`.

Lower a limit when its room shrinks. A change that raises one states the capability that it adds.
"""


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def long_functions(source) -> list[str]:
    functions = (
        node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [
        f"{source.path}:{node.lineno} {node.name}: {size} lines"
        for node in functions
        if (size := function_lines(node)) > FUNCTION_LINES
    ]


def test_files_are_short(repository, no_violations):
    no_violations(
        [
            f"{s.path}: {lines} lines"
            for s in repository
            if (lines := len(s.text.splitlines())) > FILE_LINES
        ]
    )


@pytest.mark.slow
def test_functions_are_short(repository, no_violations):
    no_violations([line for source in repository for line in long_functions(source)])


def test_the_rule_does_not_count_docstrings(source):
    body = "\n".join(["    x = 1"] * 79)
    docstring = '    """One.\n\n' + "    more\n" * 30 + '    """\n'
    assert long_functions(source(f"def f():\n{body}\n")) == []
    assert long_functions(source(f"def f():\n{docstring}{body}\n")) == []
    assert long_functions(source(f"def f():\n{body}\n    y = 2\n")) == [
        "flatout/example.py:1 f: 81 lines"
    ]


@pytest.fixture(scope="module")
def house():
    path = Path(__file__).parents[2] / "benchmarks" / "house.py"
    spec = importlib.util.spec_from_file_location("house", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["house"]


def test_rooms_keep_to_their_number_of_code_tokens(house):
    found = house.rooms(Path(flatout.__file__).parent)
    assert found.keys() == ROOMS.keys()
    assert {room: size for room, size in found.items() if size > ROOMS[room]} == {}


@pytest.mark.slow
def test_few_functions_lead_from_the_command_line_to_backward(house, tiny_set, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(house.RECIPE.replace("DATA", str(tiny_set)))
    frames = house.frames_to_backward(["train", str(recipe), "--run-dir", str(tmp_path / "run")])
    assert frames[0] == "main"
    assert frames[-1] == "train_step", frames
    assert len(frames) <= FRAMES, frames
