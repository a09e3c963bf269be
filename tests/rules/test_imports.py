"""A module imports only from entries before its own in HOUSE, and packages have no import cycles.

Every import counts: at the top of a file, inside a function, under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

HOUSE = (
    "errors",
    "progress",
    "display",
    "storage",
    "config",
    "hardware",
    "distributed",
    "data",
    "ops",
    "optim",
    "models",
    "assembly",
    "training",
    "speedups",
    "inference",
    "measure",
    "cli",
    "flatout",
    "__main__",
)
"""All modules of flatout, lowest first. See docs/decisions/0001-imports-point-down.md."""

DATA = ("conversation", "sources", "token_files", "tokenizers", "store", "load", "prepare")
"""The parts of data in order: where text comes from, then tokens on disk, then batches."""

CLI = ("terminal", "commands", "parser", "main")
"""The parts of cli in order."""

PREPARE = (
    "request",
    "pack",
    "plan",
    "workers",
    "join",
    "writer",
    "pipeline",
    "upload",
    "import_tokens",
)
"""The stages of data/prepare in order; each imports only from those before it."""

TRAINING = (
    "step",
    "evaluation",
    "agreement",
    "signals",
    "checkpoint",
    "run_dir",
    "metrics",
    "loggers",
    "upload",
    "warmup",
    "out_of_memory",
    "watchdog",
    "init_from",
    "soundness",
    "saving",
    "divergence",
    "loop",
    "run_plan",
    "rates",
    "finish",
    "run",
)
"""The modules of training in order, from one step and the state on disk up to a whole run."""


def entry_of(module: str) -> str:
    """Return a module's entry of HOUSE: `data` for `flatout.data.store.order`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "flatout"


def inside(package: str) -> Callable[[str], str | None]:
    """Return a function from a module to its entry inside `package`, or None outside it."""

    def entry(module: str) -> str | None:
        before, _, rest = module.partition(f"{package}.")
        return rest.split(".")[0] if not before and rest else None

    return entry


def imported(source, modules: set[str]) -> list[tuple[str, int]]:
    """Return the modules of flatout that a file imports, with the line numbers."""
    found: list[tuple[str, int]] = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = source.module.split(".")
                base = ".".join(
                    [
                        *parts[: len(parts) - node.level + source.is_package],
                        *filter(None, [node.module]),
                    ]
                )
            found += [
                (name if (name := f"{base}.{alias.name}") in modules else base, node.lineno)
                for alias in node.names
            ]
    return [(name, line) for name, line in found if name.split(".")[0] == "flatout"]


def violations(sources, entries=HOUSE, entry=entry_of) -> list[str]:
    modules = {source.module for source in sources}
    order = {name: index for index, name in enumerate(entries)}
    wrong = []
    for source in sources:
        own = entry(source.module)
        for target, line in imported(source, modules) if own else ():
            other = entry(target)
            if other and other != own and order.get(other, len(order)) >= order.get(own, -1):
                wrong.append(
                    f"{source.path}:{line} imports {target}: `{other}` does not come before `{own}`"
                )
    return sorted(set(wrong))


@pytest.mark.slow
def test_modules_import_only_from_entries_before_their_own(package, no_violations):
    no_violations(violations(package))


@pytest.mark.parametrize(
    ("folder", "entries"),
    [
        ("flatout.cli", CLI),
        ("flatout.data", DATA),
        ("flatout.data.prepare", PREPARE),
        ("flatout.training", TRAINING),
    ],
)
def test_a_large_package_imports_in_one_order(package, no_violations, folder, entries):
    modules = {inside(folder)(source.module) for source in package} - {None}
    no_violations(sorted(f"{name} is not in the list" for name in modules - {*entries}))
    no_violations(violations(package, entries, inside(folder)))


def test_every_module_is_in_the_list(package, no_violations):
    no_violations(sorted({entry_of(source.module) for source in package} - {*HOUSE}))


@pytest.mark.slow
def test_packages_have_no_import_cycles(package):
    modules = {source.module for source in package}
    graph = {
        source.module: {
            name
            for name, _ in imported(source, modules)
            if name != source.module and name in modules
        }
        for source in package
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"Import cycle: {' -> '.join(error.args[1])}") from None


def test_the_rule_finds_every_kind_of_import(source):
    below = source("from flatout.cli.main import main\n", "flatout/cli/main.py")
    for text in (
        "import flatout.cli.main",
        "from flatout import cli",
        "from flatout.cli.main import main",
        "from ... import cli",
        "def f():\n    from flatout.cli.main import main",
        "if TYPE_CHECKING:\n    from flatout.cli.main import main",
        "import flatout",
    ):
        assert len(violations([below, source(text, "flatout/data/store/order.py")])) == 1, text
    allowed = (
        "from flatout.errors import DataError\nimport os\nfrom flatout.data.prepare.pack import"
        " tokenize"
    )
    assert violations([source(allowed, "flatout/data/store/order.py")]) == []
