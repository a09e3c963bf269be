"""Names and comments follow the rules, and `__all__` lists exactly the public names."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize

import pytest

import flatout

pytestmark = pytest.mark.slow

MEANINGLESS_WORDS = {"util", "utils", "common", "helper", "helpers", "misc", "stuff", "manager"}
BANNER = re.compile(r"^#\s*([-=#*~_+.─═])\1{3,}|^#{2,}[^!]|([-=#*~─═])\2{3,}\s*$")
SUSPECT = re.compile(r"#[^\n]*(([-=#*~_+.─═])\2{3,}|TODO|FIXME|XXX|HACK)|^\s*#{2,}", re.MULTILINE)
TODO_WITH_ENDING = re.compile(r"TODO\([^)]{4,}\): \S")


def words(name: str) -> set[str]:
    """Return the words of a name: `data` and `utils` for `DataUtils` and `data_utils`."""
    return {
        word.lower()
        for part in name.split("_")
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part)
    }


def meaningless_names(source) -> list[str]:
    names = [(1, part.removesuffix(".py")) for part in source.path.split("/")]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names += [(node.lineno, node.name) for node in source.nodes if isinstance(node, kinds)]
    return [
        f"{source.path}:{line} {name}" for line, name in names if words(name) & MEANINGLESS_WORDS
    ]


def comments(source) -> list[tuple[int, str]]:
    """Return the comments, if some may be wrong: splitting a file into tokens is slow."""
    if not SUSPECT.search(source.text):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def bad_comments(source) -> list[str]:
    """List banners, and TODOs that are not written `TODO(what ends it): what to do`."""
    wrong = [
        f"{source.path}:{line} banner: {text}"
        for line, text in comments(source)
        if BANNER.search(text)
    ]
    for line, text in comments(source):
        if re.search(r"\b(FIXME|XXX|HACK)\b", text) or (
            "TODO" in text and not TODO_WITH_ENDING.search(text)
        ):
            wrong.append(f"{source.path}:{line} has no condition that ends it: {text}")
    return wrong


def test_no_name_is_meaningless(repository, no_violations):
    no_violations([line for source in repository for line in meaningless_names(source)])


def test_no_banners_and_no_open_ended_todos(repository, no_violations):
    no_violations([line for source in repository for line in bad_comments(source)])


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


def test_the_rules_find_violations(source):
    assert (
        len(
            meaningless_names(
                source("class RunManager: ...\ndef load_utils(): ...\n", "flatout/common.py")
            )
        )
        == 3
    )
    assert meaningless_names(source("def uncommon(): ...\nclass Utility: ...\n")) == []
    for text in (
        "# ------ helpers",
        "# =====",
        "##### here",
        "# Loading ----------",
        "# TODO: faster",
        "# FIXME",
        "# TODO later",
    ):
        assert len(bad_comments(source(f"{text}\n"))) == 1, text
    assert (
        bad_comments(
            source(
                "# a -> b, why not\n#!/usr/bin/env python\n# TODO(torch 2.12 is the oldest): drop"
                " this\nx = '# ----'\n"
            )
        )
        == []
    )


def patches_by_path(source) -> list[str]:
    """List calls such as `patch.setattr("flatout.module.name", ...)`, which renames break."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and node.args]
    return [
        f"{source.path}:{node.lineno} patches {node.args[0].value!r} by its path"
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in {"setattr", "delattr", "patch"}
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("flatout.")
    ]


def test_tests_patch_objects_instead_of_paths(repository, no_violations):
    no_violations([line for source in repository for line in patches_by_path(source)])


def test_the_rule_finds_a_patch_by_path(source):
    assert len(patches_by_path(source('p.setattr("flatout.run.x", 1)\n'))) == 1
    assert patches_by_path(source('p.setattr(run, "x", 1)\np.setattr("sys.stdin", 1)\n')) == []
