"""Tensor functions state shapes, and config fields have help."""

import ast
import re

import pytest

pytestmark = pytest.mark.slow

SHAPED = re.compile(r"^[a-z][a-z0-9_]*_[A-Z][A-Z0-9]*$")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(body, prefix=""):
    """Yield public functions, classes and methods as (dotted name, node)."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{node.name}.")


def without_shapes(source) -> list[str]:
    wrong = []
    for name, node in public_definitions(source.tree.body):
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(SHAPED.match(a.arg) for a in arguments) and not re.search(
                r"^\s*Shapes:", ast.get_docstring(node) or "", re.MULTILINE
            ):
                wrong.append(f"{source.path}:{node.lineno} {name}")
    return wrong


def config_classes(sources) -> list[tuple[str, ast.ClassDef]]:
    """Return Section and all its subclasses, found by name in all files."""
    classes = [
        (source.path, node)
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    ]
    sections = {"Section"}
    while True:
        grown = sections | {
            node.name
            for _, node in classes
            if {ast.unparse(base).rpartition(".")[2] for base in node.bases} & sections
        }
        if grown == sections:
            return [(path, node) for path, node in classes if node.name in sections]
        sections = grown


def fields_without_help(path: str, node: ast.ClassDef) -> list[str]:
    wrong = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(
            statement.annotation
        ):
            continue
        is_text = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        if not is_text:
            wrong.append(f"{path}:{statement.lineno} {node.name}.{ast.unparse(statement.target)}")
    return wrong


def test_every_tensor_function_states_its_shapes(package, no_violations):
    no_violations(
        [
            line
            for source in package
            if source.path.startswith("flatout/ops/")
            for line in without_shapes(source)
        ]
    )


def test_every_config_field_has_help(package, no_violations):
    classes = config_classes(package)
    assert len(classes) > 8
    no_violations([line for path, node in classes for line in fields_without_help(path, node)])


def test_the_rules_see_offenders(source):
    assert without_shapes(source('def f(hidden_BTD, *, start_BK=None):\n    """Do."""\n')) == [
        "flatout/example.py:1 f"
    ]
    assert (
        without_shapes(
            source(
                'def f(hidden_BTD):\n    """Do.\n\n    Shapes: hidden_BTD (B, T, D).\n    """\ndef'
                " g(num_rows): ...\n"
            )
        )
        == []
    )
    config = source(
        'class A(Section):\n    x: int = 1\n    """Help."""\n    y: int = 2\nclass B(A):\n    z:'
        " ClassVar[int] = 1\n    w: int\n"
    )
    assert [
        line for path, node in config_classes([config]) for line in fields_without_help(path, node)
    ] == ["flatout/example.py:4 A.y", "flatout/example.py:7 B.w"]
