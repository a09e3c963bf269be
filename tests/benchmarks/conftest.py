"""The benchmark that a test file is named after."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def benchmark(load, request):
    """Return the file of benchmarks/ that the test's file is named after."""
    return load(request.path.stem.removeprefix("test_"))
