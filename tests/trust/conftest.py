"""Fixtures of the tests of trust: a temporary home directory, and an untrusted run."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from gifts import Gift


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Give the test its own home, working directory and search path; drop what it imports."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = {*sys.modules}
    yield home
    for name in {*sys.modules} - before:
        if name.split(".")[0] in {"runs", "weights"}:
            del sys.modules[name]


@pytest.fixture
def gift(tmp_path, fox_run):
    return Gift(tmp_path / "runs" / "gift", fox_run[0] / "runs" / "fox")
