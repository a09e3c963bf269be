"""Stop requests: signals, repeated signals, announcements, votes, a launcher that ends."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from stand_in import ALONE

from flatout.distributed.launch import SAME_REQUEST_S
from flatout.training.signals import StopRequests, WorkInterrupted

RUN = SimpleNamespace(mesh=ALONE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_requests_a_stop_without_an_interrupt(number):
    with StopRequests() as stop:
        assert not stop.requested(RUN)
        os.kill(os.getpid(), number)
        assert stop.requested(RUN)
        assert stop.signal_number == number


def test_a_second_sigint_interrupts_at_once():
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += SAME_REQUEST_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested(RUN)


def test_a_request_that_arrives_twice_counts_once():
    """A terminal sends SIGINT to the whole group, and a launcher forwards its own."""
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += SAME_REQUEST_S / 2
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested(RUN)
        assert stop.signal_number == signal.SIGINT


def test_repeated_sigterm_does_not_interrupt():
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 10 * SAME_REQUEST_S
        assert stop.requested(RUN)


def test_the_time_since_the_first_request_is_known():
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        assert stop.since_request_s() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        now[0] += 2.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.since_request_s() == 2.5
        assert stop.cause == "SIGUSR1"


def signal_twice():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt cleaning up


def test_a_request_interrupts_work_once_and_later_work_before_it_begins():
    with StopRequests() as stop:
        stop.waits_for = "the micro-batch"
        with stop.interruptible():
            pass
        assert stop.waits_for == "the micro-batch"
        with pytest.raises(WorkInterrupted), stop.interruptible():
            signal_twice()
        with pytest.raises(WorkInterrupted), stop.interruptible():
            pytest.fail("work began after the request")
        os.kill(os.getpid(), signal.SIGUSR1)  # no work is in progress
        assert stop.requested(RUN)


def test_previous_handlers_are_restored_even_after_an_error():
    def mine(*_):
        """A handler that the program installed."""

    before = signal.signal(signal.SIGTERM, mine)
    try:
        stop = StopRequests()
        stop.__enter__()
        assert signal.getsignal(signal.SIGTERM) is not mine
        stop.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_changes_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    asked = []

    def work():
        with StopRequests() as stop:
            asked.append(stop.requested(RUN))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_request_is_announced_once_with_the_work_in_progress():
    messages, heard = [], threading.Event()
    with StopRequests(say=lambda line: (messages.append(line), heard.set())) as stop:
        stop.waits_for = "the micro-batch"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert heard.wait(60)
    assert messages == [
        "SIGTERM received: the run waits for the micro-batch, then saves and stops."
    ]


def test_the_announcement_names_no_work_that_can_be_interrupted():
    messages, heard = [], threading.Event()
    with StopRequests(say=lambda line: (messages.append(line), heard.set())) as stop:
        with pytest.raises(WorkInterrupted), stop.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(60)
    assert messages == ["SIGUSR1 received: the run saves and stops."]


def test_several_gpus_vote_before_every_eighth_micro_batch_and_one_process_before_each(monkeypatch):
    with StopRequests() as stop:
        asked = []
        monkeypatch.setattr(stop, "requested", lambda run: asked.append(run) or False)
        several = SimpleNamespace(
            mesh=SimpleNamespace(world_size=2, device=SimpleNamespace(type="cuda"))
        )
        for number in range(2, 65):
            stop.requested_within_step(RUN, number)
            stop.requested_within_step(several, number)
    assert asked.count(RUN) == 63
    assert asked.count(several) == 7


def test_a_killed_launcher_is_a_request_to_stop(monkeypatch):
    messages = []
    stop = StopRequests(say=messages.append, launcher=os.getppid())
    assert not stop.requested(RUN)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.requested(RUN)
    assert stop.requested_within_step(RUN, 2)
    assert len(messages) == 1
    assert messages[0].startswith("The launcher, process ")
    assert stop.cause == "the end of the launcher"
    assert stop.since_request_s() >= 0
    assert not StopRequests().requested(RUN), "without a launcher, the parent process may end first"
