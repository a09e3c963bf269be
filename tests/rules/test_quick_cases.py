"""Every case that `quick_cases` names exists, so that `make test` has a case of each test."""

import ast

import pytest


def quick_cases(source) -> list[str]:
    """Return the node ids of the cases that a file's tests name as quick."""
    tests = [node for node in source.tree.body if isinstance(node, ast.FunctionDef)]
    return [
        f"{source.path}::{test.name}[{case.value}]"
        for test in tests
        for mark in test.decorator_list
        if ast.unparse(mark).startswith("pytest.mark.quick_cases(")
        for case in mark.args
    ]


@pytest.mark.slow
def test_every_quick_case_exists(request, repository, no_violations):
    named = [case for source in repository for case in quick_cases(source)]
    found = {item.nodeid for item in request.session.items}
    files = {case.partition("::")[0] for case in found}
    if request.config.option.keyword or any("::" in path for path in request.config.args):
        pytest.skip("only some tests were collected")
    no_violations(
        [case for case in named if case.partition("::")[0] in files and case not in found]
    )
    assert len(named) > 30


def test_the_rule_finds_the_cases(source):
    text = '@pytest.mark.quick_cases("a", "b-1")\n@x\ndef test_f(): ...\n'
    assert quick_cases(source(text, "t.py")) == ["t.py::test_f[a]", "t.py::test_f[b-1]"]
