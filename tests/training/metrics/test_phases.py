"""The phase timer counts each moment once."""

import gc
import threading

import pytest

from flatout.training.metrics.phases import PhaseTimer

pytestmark = pytest.mark.slow


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    return PhaseTimer(clock)


def test_the_time_of_an_inner_phase_does_not_count_for_the_outer_one(timer, clock):
    with timer.phase("compute"):
        clock.now_s += 1
        with timer.phase("gc"):
            clock.now_s += 2
        clock.now_s += 4
    clock.now_s += 8
    assert timer.seconds == {"compute": 5, "gc": 2}
    assert timer.calls == {"compute": 1, "gc": 1}
    assert timer.current is None


def test_a_phase_ends_when_its_block_raises(timer, clock):
    def fail():
        clock.now_s += 1
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"), timer.phase("compute"):
        fail()
    assert timer.current is None
    assert timer.seconds["compute"] == 1


def test_starts_and_ends_are_told(timer):
    told = []
    timer.on_change = told.append
    with timer.phase("compute"), timer.phase("gc"):
        pass
    timer.leave()  # nothing is running
    assert told == ["compute", "gc", None, None]


def test_reset_forgets_all_but_the_running_phase(timer, clock):
    with timer.phase("compute"):
        clock.now_s += 5
        timer.reset()
        clock.now_s += 1
    assert timer.seconds == {"compute": 1}


def test_the_collector_is_a_phase_wherever_it_runs(timer):
    before = list(gc.callbacks)
    with timer.collecting_gc():
        with timer.phase("compute"):
            gc.collect()
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    assert gc.callbacks == before
    # gc.collect() in another thread is not this thread's time
    assert timer.full_collections >= 1
    assert timer.calls["gc"] >= 1
    assert timer.current is None
