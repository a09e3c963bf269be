"""A dataset, a run to inject faults into, and the process that commands are forked from."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from children import Children
from victim import SPEEDUPS, Victim


@pytest.fixture(scope="session")
def settings(tiny, tiny_set):
    """The settings of a run of 8 steps that draws random numbers and saves every second step."""
    return tiny | {
        "data.path": str(tiny_set),
        "model.dropout": 0.1,
        "train.steps": 8,
        "train.eval_every": 4,
        "train.eval_tokens": 128,
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 2,
    }


@pytest.fixture(scope="session")
def children(tmp_path_factory, settings):
    """Starts commands without the cost of an import."""
    folder = tmp_path_factory.mktemp("children")
    warm = Victim(None, folder, settings)
    children = Children(folder)
    children.warm_up(*warm.words(folder / "warm"))
    yield children
    children.close()


@pytest.fixture(scope="session")
def victim(children, settings, tmp_path_factory):
    """Return a function that returns the run to inject faults into."""
    made = {}

    def make(steps=8, way="beside", *, ranks=1, shard=1):
        key = steps, way, ranks, shard
        if key not in made:
            changed = settings | {"train.steps": steps, "speedups": SPEEDUPS[way]}
            changed |= {"parallel.shard": shard} if shard > 1 else {}
            folder = tmp_path_factory.mktemp("victim")
            made[key] = Victim(children, folder, changed, ranks=ranks)
        return made[key]

    return make
