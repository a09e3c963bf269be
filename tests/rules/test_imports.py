"""Imports only point up the list: a module may import the modules before it, and those of its own
package in one direction.

Every import counts: at the top of a file, inside a function, under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

HOUSE = (
    "errors",
    "noise",
    "recognised",
    "cache",
    "streams",
    "files",
    "json_io",
    "documents",
    "registry",
    "trust",
    "progress",
    "transfer",
    "config",
    "hardware",
    "roof",
    "parallel",
    "sources",
    "data",
    "ops",
    "models",
    "optimizers",
    "measured",
    "assembly",
    "training",
    "speedups",
    "inference",
    "measure",
    "terminal",
    "recommended",
    "commands",
    "parser",
    "flatout",
    "cli",
    "__main__",
)
"""The list. docs/decisions/0001-imports-point-down.md says why."""

PREPARE = (
    "request",
    "pack",
    "plan",
    "workers",
    "join",
    "writer",
    "pipeline",
    "upload",
    "chunks",
    "import_chunks",
)
"""The order of the stages in data/prepare, which import each other in one direction too."""


def place(module: str) -> str:
    """The entry of the list that `flatout.data.store.order` belongs to: `data`. The package's own
    file is `flatout`.
    """
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "flatout"


def stage(module: str) -> str | None:
    """The entry of PREPARE that a module of data/prepare belongs to; None elsewhere."""
    package, _, rest = module.partition("flatout.data.prepare.")
    return rest.split(".")[0] if not package and rest else None


def imported(source, modules: set[str]) -> list[tuple[str, int]]:
    """The modules of flatout that a file imports anywhere in it, and the lines that do."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(source.tree):
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


def offenders(sources, entries=HOUSE, entry=place) -> list[str]:
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


def test_imports_only_point_up_the_list(package, no_offenders):
    no_offenders(offenders(package))


def test_stages_of_prepare_import_in_one_direction(package, no_offenders):
    no_offenders(offenders(package, PREPARE, stage))


def test_every_module_has_its_place_in_the_list(package, no_offenders):
    no_offenders(sorted({place(source.module) for source in package} - {*HOUSE}))


def test_no_cycles_inside_a_package(package):
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
        raise AssertionError(f"These import each other: {' -> '.join(error.args[1])}") from None


def test_the_rule_sees_each_kind_of_import(source):
    below = source("from flatout.cli import main\n", "flatout/cli.py")
    for text in (
        "import flatout.cli",
        "from flatout import cli",
        "from flatout.cli import main",
        "from ... import cli",
        "def f():\n    from flatout.cli import main",
        "if TYPE_CHECKING:\n    from flatout.cli import main",
        "import flatout",
    ):
        assert len(offenders([below, source(text, "flatout/data/store/order.py")])) == 1, text
    allowed = (
        "from flatout.errors import DataError\nimport os\nfrom flatout.data.prepare.pack import"
        " tokenize"
    )
    assert offenders([source(allowed, "flatout/data/store/order.py")]) == []
