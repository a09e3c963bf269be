"""Errors say what happened and how to fix it, have flatout's own types, and are not swallowed."""

import ast
import inspect

import pytest

import flatout.errors

FAMILY = {
    name
    for name, value in vars(flatout.errors).items()
    if inspect.isclass(value) and issubclass(value, flatout.errors.FlatoutError)
}
NOT_FOR_USERS = {
    "Exception",
    "BaseException",
    "RuntimeError",
    "ValueError",
    "TypeError",
    "OSError",
    "IOError",
    "EnvironmentError",
    "AssertionError",
    "LookupError",
}

PARTS_OF_EXPORTS = "flatout/inference/export/modeling/"
"""Files that run in other programs, without flatout's errors."""


def called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def last_words(node: ast.expr) -> str | None:
    """Return the constant text that an expression ends with, or None if it ends with a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return last_words(node.values[-1]) if node.values else ""
    if isinstance(node, ast.BinOp):
        return last_words(node.right)
    return None


def is_sentence(words: str) -> bool:
    return words.rstrip(")'\"`").endswith((".", "?", "!"))


def without_fix(source) -> list[str]:
    """List errors that lack `fix=` or a message, or whose text is not a sentence."""
    wrong = []
    for node in source.nodes:
        if not isinstance(node, ast.Call) or called(node) not in FAMILY:
            continue
        where = f"{source.path}:{node.lineno} {called(node)}"
        fix = next((keyword.value for keyword in node.keywords if keyword.arg == "fix"), None)
        if fix is None:
            wrong.append(f"{where} has no fix=")
        if len(node.args) != 1:
            wrong.append(f"{where} takes one positional argument: what happened")
        endings = [
            words
            for part in [*node.args, fix]
            if part is not None and (words := last_words(part)) is not None
        ]
        wrong += [
            f"{where}: not a whole sentence: ...{words[-40:]!r}"
            for words in endings
            if not is_sentence(words)
        ]
    return wrong


def raised_at_users(source) -> list[str]:
    """List raises of Python's general exceptions, which have no fix."""
    raises = (node for node in source.nodes if isinstance(node, ast.Raise) and node.exc is not None)
    names = (
        (node.lineno, ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc))
        for node in raises
    )
    return [f"{source.path}:{line} raises {name}" for line, name in names if name in NOT_FOR_USERS]


def swallowed(source) -> list[str]:
    """List handlers that catch every exception and do nothing."""
    handlers = (node for node in source.nodes if isinstance(node, ast.ExceptHandler))
    return [
        f"{source.path}:{node.lineno} swallows every exception"
        for node in handlers
        if (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
        and all(isinstance(s, ast.Pass) for s in node.body)
    ]


@pytest.mark.slow
def test_every_error_has_a_fix(package, no_violations):
    no_violations([line for source in package for line in without_fix(source)])


@pytest.mark.slow
def test_only_errors_of_flatout_are_raised(package, no_violations):
    no_violations(
        [
            line
            for source in package
            if not source.path.startswith(PARTS_OF_EXPORTS)
            for line in raised_at_users(source)
        ]
    )


@pytest.mark.slow
def test_no_exception_is_swallowed(repository, no_violations):
    no_violations([line for source in repository for line in swallowed(source)])


def test_the_rules_find_violations(source):
    assert without_fix(source("raise DataError('Broken.')")) == [
        "flatout/example.py:1 DataError has no fix="
    ]
    assert without_fix(source("def f():\n    return errors.ConfigError(fix='Mend it.')")) == [
        "flatout/example.py:2 ConfigError takes one positional argument: what happened"
    ]
    assert len(without_fix(source("raise DataError(f'{x} is broken', fix='Mend it.')"))) == 1
    assert (
        without_fix(source("raise DataError(f'{x} is broken.', fix=f'Did you mean {guess!r}?')"))
        == []
    )
    assert raised_at_users(source("raise ValueError('no')")) == [
        "flatout/example.py:1 raises ValueError"
    ]
    assert (
        raised_at_users(source("raise NotImplementedError\nraise\nraise KeyboardInterrupt")) == []
    )
    assert len(swallowed(source("try:\n    f()\nexcept Exception:\n    pass\n"))) == 1
    assert swallowed(source("try:\n    f()\nexcept KeyError:\n    pass\n")) == []
