"""The size of code, on sources small enough to count by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "house.py"


@pytest.fixture
def house(monkeypatch):
    spec = importlib.util.spec_from_file_location("house", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "house", module)
    spec.loader.exec_module(module)
    return module


def test_comments_docstrings_and_layout_are_not_code(house):
    plain = "def f(a):\n    return a + 1\n"
    explained = '"""Module."""\n\n# Why\ndef f(\n    a,\n):\n    """Add one."""\n    return a + 1\n'
    assert house.code_tokens(plain) == house.code_tokens(explained) == 10
