"""`__all__` lists exactly the public names."""

from __future__ import annotations

import ast
import importlib

import pytest

import flatout

pytestmark = pytest.mark.slow


def declared(source) -> list[str] | None:
    """Return the names in `__all__`, or None without it."""
    for node in source.tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(importlib.import_module(source.module).__all__)
    return None


def public_names(source) -> set[str]:
    """Return the public names that a file defines or, as a package, re-exports."""
    names: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif (
            isinstance(node, ast.ImportFrom)
            and source.is_package
            and (node.module or "").startswith(source.module)
        ):
            names.update(alias.asname or alias.name for alias in node.names)
    return {name for name in names if not name.startswith("_")}


def typed_imports(source) -> set[str]:
    """Return the names that a file imports only for type checkers."""
    blocks = [
        node
        for node in source.tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_the_package_exports_what_type_checkers_see(package):
    """Names of flatout are imported on first use, by the text of the imports for type checkers."""
    source = next(source for source in package if source.module == "flatout")
    names = {*flatout.__all__} - {"__version__"}
    assert names == typed_imports(source)
    for name in names:
        assert getattr(flatout, name).__module__.startswith("flatout."), name


def test_all_equals_the_public_names(package):
    for source in package:
        names = declared(source)
        if names is not None:
            assert len(set(names)) == len(names), source.path
            if source.module != "flatout":
                assert set(names) == public_names(source), source.path
