"""Make the modules of cases importable, and the directory in which each case runs."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from case import Answers, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A directory with texts, a recipe, a dataset and a run."""
    return make_world(tmp_path_factory.mktemp("bad") / "world")


@pytest.fixture(scope="session")
def answers(world, tmp_path_factory):
    """A function that runs a case and returns its answer."""
    return Answers(world, tmp_path_factory)
