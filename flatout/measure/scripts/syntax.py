"""Reads Python's syntax trees for a patch. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

EXACT = r"{0}\.(?:argmax|argsort|topk|shape|size)\b|\bargmax\({0}"
"""What reads of a result its type does not change."""


def blocks_of(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a tree."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def items_of(made: ast.Dict | ast.Call) -> dict[str | None, ast.expr]:
    """Return what a dictionary has, by its keys."""
    if isinstance(made, ast.Call):
        return {one.arg: one.value for one in made.keywords}
    keys = (ast.unparse(key).strip("'") if key else None for key in made.keys)
    return dict(zip(keys, made.values, strict=True))


def reads_values(tree: ast.AST, name: str, functions: Sequence[ast.stmt]) -> bool:
    """Return whether code reads more of a variable than what its type does not change.

    What it passes to one of the `functions` is what that reads.
    """
    one, text = rf"(?<![\w.]){re.escape(name)}\b", ast.unparse(tree)
    called = {f.name: f for f in functions if isinstance(f, ast.FunctionDef)}
    for call in ast.walk(tree):
        function = called.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or function is None:
            continue
        body, others = ast.Module(function.body, []), [f for f in functions if f is not function]
        taken = [*function.args.posonlyargs, *function.args.args]
        passed = [to.arg for to, value in zip(taken, call.args, strict=False)
                  if ast.unparse(value) == name]  # fmt: skip
        whole = ast.unparse(call)
        if len(re.findall(one, whole)) == len(passed) and not any(
            reads_values(body, each, others) for each in passed
        ):
            text = text.replace(whole, "")
    return bool(re.search(one, re.sub(EXACT.format(one), "", text)))


def names_in(tree: ast.AST, use: type[ast.expr_context]) -> set[str]:
    """Return the names and attributes that are read, or written."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, use)
    }
