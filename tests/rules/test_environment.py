"""Only three files read environment variables, so that no other code depends on the shell."""

import ast

import pytest

ALLOWED = {"flatout/distributed/rendezvous.py", "flatout/cli/main.py", "flatout/storage/cache.py"}
ALLOWED.add("flatout/measure/attach/sitecustomize.py")  # a program of its own
ALLOWED.add("flatout/distributed/launch.py")  # for processes that it starts
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def reads_environment(source) -> list[str]:
    nodes = list(source.nodes)
    uses = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in NAMES
        and ast.unparse(node.value) in {"os", "posix"}
    ]
    uses += [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and node.module in {"os", "posix"}
        and {a.name for a in node.names} & NAMES
    ]
    lines = {node.lineno for node in uses}
    return [f"{source.path}:{line}" for line in sorted(lines)]


@pytest.mark.slow
def test_only_three_files_read_the_environment(package, no_violations):
    no_violations(
        [
            line
            for source in package
            if source.path not in ALLOWED
            for line in reads_environment(source)
        ]
    )


def test_the_rule_finds_every_form(source):
    for text in (
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "#\nfrom os import environ",
        "import os\ndict(os.environ)",
    ):
        assert reads_environment(source(text)) == ["flatout/example.py:2"], text
    assert reads_environment(source("import os\nos.cpu_count()\nenviron = 3\n")) == []
