"""The scripts of benchmarks/, imported as modules."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kit(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("first_contact")


@pytest.fixture
def plan(kit):
    return importlib.import_module("contact_plan")
