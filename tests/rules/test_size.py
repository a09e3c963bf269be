"""Files have at most 700 lines, functions at most 80, not counting their docstrings."""

from __future__ import annotations

import ast

import pytest

FILE_LINES, FUNCTION_LINES = 700, 80


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def long_functions(source) -> list[str]:
    functions = (
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
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
