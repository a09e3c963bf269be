"""Makes the cases importable, and the folder in which each is tried."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from asking import Answers, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with texts, a recipe, a data set and a run, as a user may have it."""
    return make_world(tmp_path_factory.mktemp("bad") / "world")


@pytest.fixture(scope="session")
def answers(world, tmp_path_factory):
    """What the command line answers to a case: each is tried once, in a copy of the world."""
    return Answers(world, tmp_path_factory)
