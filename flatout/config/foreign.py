"""Reads the config file of another tool, as values or as a Python file that assigns them.

Files are parsed and never executed: of a Python file, assignments of literals and of arithmetic on
numbers are read.
"""

from __future__ import annotations

import ast
import json
import operator
import tomllib
from pathlib import Path
from typing import Any

from flatout.documents import parse_yaml, read_text
from flatout.errors import ConfigError
from flatout.json_io import JsonObject

OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
"""Arithmetic that a Python file may contain; powers are left out, since they can be very large."""


def read_settings(path: Path) -> tuple[JsonObject, list[str]]:
    """Return the values in a YAML, JSON, TOML or Python file, and the names of computed ones.

    Raises: ConfigError when the file cannot be read or is not a mapping.
    """
    text, kind = read_text(path, "a config"), path.suffix.lower()
    try:
        if kind == ".py":
            return _python_values(text)
        document = (
            json.loads(text)
            if kind == ".json"
            else tomllib.loads(text)
            if kind == ".toml"
            else parse_yaml(text, name=str(path))
        )
    except (ValueError, SyntaxError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid {kind[1:].upper() if kind != '.py' else 'Python'}: {error}.",
            fix="Correct it there.",
        ) from error
    if not isinstance(document, dict) or not document:
        raise ConfigError(
            f"{path} is not a mapping of keys to values.",
            fix="Name the config of another tool: YAML, JSON, TOML, or a Python file that assigns "
            "values.",
        )
    return document, []


def _python_values(text: str) -> tuple[JsonObject, list[str]]:
    values: JsonObject = {}
    computed: list[str] = []
    targets: list[ast.expr]
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if not isinstance(target, ast.Name) or target.id.startswith("_"):
                continue
            try:
                values[target.id] = _literal(value)
            except (ValueError, TypeError, ArithmeticError):
                computed.append(target.id)
    return values, computed


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of arithmetic on numbers.

    Raises: ValueError for anything else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return OPERATORS[type(node.op)](left, right)
    value = ast.literal_eval(node)
    json.dumps(value)  # bytes, sets and complex numbers have no place in a config
    return value
