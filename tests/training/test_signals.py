import os
import signal
import threading
from types import SimpleNamespace

import pytest
from stand_in import ALONE

from flatout.training.signals import SAME_REQUEST_S, StopRequests

RUN = SimpleNamespace(mesh=ALONE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_interrupts_nothing(number):
    with StopRequests() as stop:
        assert not stop.asked(RUN)
        os.kill(os.getpid(), number)
        assert stop.asked(RUN)
        assert stop.signal_number == number


def test_a_second_sigint_interrupts_at_once():
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += SAME_REQUEST_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked(RUN)


def test_one_request_that_arrives_twice_is_one():
    """A terminal sends SIGINT to the whole group, and a launcher passes its own on."""
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += SAME_REQUEST_S / 2
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked(RUN)
        assert stop.signal_number == signal.SIGINT


def test_a_sigterm_may_come_any_number_of_times():
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 10 * SAME_REQUEST_S
        assert stop.asked(RUN)


def test_the_handlers_of_before_come_back_even_after_an_error():
    def mine(*_):
        """Stand for a handler of the program's own."""

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


def test_outside_the_main_thread_nothing_is_changed():
    before = signal.getsignal(signal.SIGTERM)
    asked = []

    def work():
        with StopRequests() as stop:
            asked.append(stop.asked(RUN))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
    assert signal.getsignal(signal.SIGTERM) is before
