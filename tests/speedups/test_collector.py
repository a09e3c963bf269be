"""Python collects at fixed steps during the loop, and as before once it has ended in any way."""

import gc
import weakref

import pytest

from flatout.speedups.collector import STEPS_BETWEEN, at_fixed_steps
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_frozen():
    """Unfreeze what was frozen before the tests, which makes every collection take long."""
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    """Refers to itself."""

    def __init__(self):
        self.itself = self


class Watch(Quiet):
    def __init__(self):
        self.automatic, self.alive, self.nodes = [], [], []

    def on_tick(self, step, last_step):
        self.automatic.append(gc.isenabled())
        self.alive.append(sum(node() is not None for node in self.nodes))
        self.nodes.append(weakref.ref(Node()))


class Broken(Quiet):
    def on_tick(self, step, last_step):
        raise ValueError("an observer fails")


def test_a_run_collects_at_fixed_steps_only_and_leaves_the_process_as_it_was(tiny_config, tmp_path):
    watch = Watch()
    config = tiny_config(
        speedups="auto,-compile,+collector", train__steps=STEPS_BETWEEN + 2, log__every=50
    )
    run_training(config, tmp_path / "run", observers=[watch])
    assert watch.automatic == [False] * (STEPS_BETWEEN + 2)
    assert watch.alive[STEPS_BETWEEN - 1] == STEPS_BETWEEN - 1, (
        "nothing was collected before its step"
    )
    assert watch.alive[STEPS_BETWEEN] == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_failing_run_restores_the_collector(tiny_config, tmp_path):
    with pytest.raises(ValueError, match="an observer fails"):
        run_training(
            tiny_config(speedups="auto,-compile,+collector"), tmp_path / "run", observers=[Broken()]
        )
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_without_the_speedup_collection_is_automatic(tiny_config, tmp_path):
    watch = Watch()
    run_training(tiny_config(speedups="none"), tmp_path / "run", observers=[watch])
    assert all(watch.automatic)


def test_a_disabled_collector_and_frozen_objects_stay_so():
    gc.disable()
    gc.freeze()
    try:
        with at_fixed_steps():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
