"""Parse the source files that the rules check, without importing them."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file of the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read(folder: str) -> list[Source]:
    return [
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


@pytest.fixture(scope="session")
def package() -> list[Source]:
    """Every Python file of flatout/."""
    return read("flatout")


@pytest.fixture(scope="session")
def repository(package: list[Source]) -> list[Source]:
    """Every Python file of flatout/, tests/ and benchmarks/."""
    return [*package, *read("tests"), *read("benchmarks")]


@pytest.fixture(scope="session")
def source():
    """Return a Source with the given text, to test that a rule finds violations."""
    return lambda text, path="flatout/example.py": Source(path, text)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def no_violations():
    """Fail with one line per violation."""

    def check(violations: list[str]) -> None:
        if violations:
            pytest.fail("\n".join(["", *violations]), pytrace=False)

    return check
