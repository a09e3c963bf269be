"""The public names: all there, all lazy."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flatout

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", flatout.__all__)
def test_every_public_name_is_there(name):
    assert getattr(flatout, name) is not None
    assert name in dir(flatout)


def test_what_type_checkers_see_is_what_there_is():
    tree = ast.parse((ROOT / "flatout/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: f"{node.module}:{alias.name}" for node in block.body for alias in node.names}
    assert set(seen) == set(flatout.__all__) - {"__version__"} == set(flatout._HOMES)
    for name, home in flatout._HOMES.items():
        module, _, attribute = home.partition(":")
        assert seen[name] == f"{module}:{attribute or name}"


def test_functions_that_share_a_module_name_stay_callable():
    importlib.import_module("flatout.generate")
    assert callable(flatout.sample)
    assert callable(flatout.train)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = flatout.trian


def test_version_is_the_packages():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == flatout.__version__


def test_import_loads_neither_torch_nor_anything_slow():
    program = "import sys, flatout; dir(flatout); print(sorted({'torch', 'rich', 'typer', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"
